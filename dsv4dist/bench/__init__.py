"""Measurements: one file each, returning rows; `report` shows them."""

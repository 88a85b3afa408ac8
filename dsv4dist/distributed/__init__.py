"""Tensor parallelism: who owns which slice, and the collectives between the owners."""

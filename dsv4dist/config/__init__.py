"""Frozen configurations: the model's, read from config.json, and the run's, from options."""

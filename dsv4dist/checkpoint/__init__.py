"""Checkpoint directories: what must be in them, reading one rank's share, writing random ones."""

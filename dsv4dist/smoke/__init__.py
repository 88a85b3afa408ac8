"""Checks of a cluster before anything is run on it: each node, each GPU, and what they do together."""

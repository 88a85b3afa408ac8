"""Paged memory: which groups of caches a model has, how large their blocks are, and who owns which block."""

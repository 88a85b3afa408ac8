"""The operations in Triton, one file each, with the tuned values of every architecture as tables."""

"""The operations in Triton, one file each, with the tuned values of every architecture as tables."""

from dsv4dist.env import keep_fp_fusion

keep_fp_fusion()

"""The driver: requests in, tokens out. No device code."""

"""Every operation in plain torch: any device, written to be read, the meaning that other implementations must match."""

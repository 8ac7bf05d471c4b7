"""The attention of RWKV-4: for each channel a mean of values with decaying weights, for keys of any size."""

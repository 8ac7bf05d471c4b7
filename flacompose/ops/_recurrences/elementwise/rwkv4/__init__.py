"""The attention of RWKV-4: a mean of values by decaying weights, each channel by itself, at any size of its keys."""

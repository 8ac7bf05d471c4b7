"""Mamba-3's rotary embedding with biases, and the shift of keys and values by one token."""

"""Mamba-3's rotary embedding with biases, and keys and values shifted by one token."""

"""Mamba-3's rotation: queries and keys with the biases of their heads, turned; keys and values go to the next token."""

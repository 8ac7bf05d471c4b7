"""Functions of tensors for every part of the library: dtypes, sizes, packed rows, distributed tensors, gates."""

"""What every part of the library does with tensors: dtypes, sizes, packed rows, distributed tensors, gates."""

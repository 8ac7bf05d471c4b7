"""Replacements for parts of transformers' models: a file for each model or family, and one for each thing they share.

- `convolution`, `delta_rule` and `mamba_scan` have the functions that modeling files call for their recurrences. They
  take the arguments of the functions that they replace, and ignore the same ones. Where a modeling file expects that
  its cache is written to, it is written to here, at the edge: the ops themselves return new states.
- `layer`, `packed`, `cache` and `module_with` have the parts of which a forward that replaces another is made.
- Every other file is named for a model. Its functions take a forward of transformers and return the forward that
  replaces it.
"""

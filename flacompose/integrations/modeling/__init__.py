"""Replacements for parts of transformers' models: a file for each model or family, and one for each thing they share.

- `convolution`, `delta_rule` and `mamba_scan` have the functions that modeling files call for their recurrences. They
  take the arguments of the functions that they replace, and ignore the same ones. Where a modeling file expects that
  its cache is written to, it is written to here, at the edge: the ops themselves return new states.
- `arguments` reads caches, bounds and masks from the arguments of a forward. `forward` has the parts that forwards of
  several models are made of, and `caches` the caches that transformers lacks.
- Every other file is named for a model. Its table `FORWARDS` has, by the names of classes, functions that take the
  forward of the class and return the forward that replaces it. A layer that is in no table, and whose forward calls the
  functions above, gets `plain_layer_forward`.
"""

"""Replacements for parts of transformers' models: one file per group of models, and files for shared parts.

- `convolution`, `delta_rule` and `mamba_scan` replace the functions that modeling files call for their recurrences, and
  take the same arguments. If a modeling file expects a function to write to its cache, the replacement does so; the ops
  return new states.
- `arguments` reads caches, bounds and masks from the arguments of a forward, `forward` has the common parts of
  forwards, and `caches` has caches that transformers lacks.
- All other files are named after a model. Their table `FORWARDS` maps the names of classes to functions that take the
  forward of the class and return its replacement. A layer in no table whose forward calls the functions above gets
  `plain_layer_forward`.
"""

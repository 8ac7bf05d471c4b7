"""Time and accuracy of flacompose beside another implementation: ``python -m benchmarks.run --help``."""

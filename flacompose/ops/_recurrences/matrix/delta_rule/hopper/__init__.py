"""The kernels of the delta rule for Hopper, in Gluon."""

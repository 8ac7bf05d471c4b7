"""How kernels are launched: on which chip, with which operands, for which rows, and compiled beforehand."""

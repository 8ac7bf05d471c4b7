"""The private names of PyTorch's compiler that this package uses. Only `Decoder` imports them, since it is slow."""

from __future__ import annotations

from flacompose._torch import private_names

with private_names():
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as kernel_side_table
    from torch._higher_order_ops.triton_kernel_wrap import (
        triton_kernel_wrapper_functional as triton_kernel_wrapper_functional,
    )
    from torch._inductor import config as config
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass

"""Kernels without tuples, for graphs.

A graph of PyTorch takes tensors, numbers and None as arguments of a kernel. So a kernel with named tuples
enters it as a copy of the kernel that has a parameter for each field: ``gates_sums`` in place of ``gates.sums``.
"""

from __future__ import annotations

import ast
import linecache
from functools import cache
from typing import Any


def without_tuples(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The kernel whose parameters are no tuples, and its arguments by name."""
    arguments: dict[str, Any] = {}
    fields: dict[str, tuple[str, ...]] = {}
    given: dict[str, Any] = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    for name, x in given.items():
        if hasattr(x, "_fields"):
            names = fields[name] = tuple(f"{name}_{field}" for field in x._fields)
            arguments |= zip(names, x, strict=True)
        else:
            arguments[name] = x
    return _copy(kernel, tuple(fields.items())) if fields else kernel, arguments


@cache
def _copy(kernel: Any, fields: tuple[tuple[str, tuple[str, ...]], ...]) -> Any:
    """`kernel` with the parameters `fields` in place of each tuple."""
    import triton  # only where kernels are: the package is imported without it too

    tree = _Fields(dict(fields)).visit(ast.parse(kernel.src))
    source, file = ast.unparse(tree), f"<{kernel.__name__} of {fields}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # Triton reads it there
    functions: dict[str, Any] = {}
    exec(compile(source, file, "exec"), kernel.fn.__globals__, functions)
    copy: Any = triton.jit(functions[kernel.__name__], do_not_specialize=kernel.do_not_specialize)
    copy.copy_of = kernel
    return copy


class _Fields(ast.NodeTransformer):
    """A function whose parameters and variables are `fields` in place of tuples."""

    def __init__(self, fields: dict[str, tuple[str, ...]]) -> None:
        self.fields = fields

    def visit_arguments(self, node: ast.arguments) -> ast.arguments:
        node.args = [
            ast.arg(name, x.annotation) for x in node.args for name in self.fields.get(x.arg, (x.arg,))
        ]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id in self.fields:
            return ast.Name(f"{node.value.id}_{node.attr}", node.ctx)
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.fields:
            return node
        return ast.Tuple([ast.Name(name, node.ctx) for name in self.fields[node.id]], node.ctx)

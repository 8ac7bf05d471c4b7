"""Build hooks: the README as a package index shows it, and what type checkers know of the operators."""

from __future__ import annotations

import ast
import builtins
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]+\)")
STUB = "flacompose/ops/__init__.pyi"
# The arguments that decide whether a state is returned.
FLAGS = {"output_final_state", "return_final_states", "return_last_state", "return_state"}


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Of each link that is not absolute, keep the text. An index has no anchors for headings either."""
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": LINK.sub(r"\1", readme)}


class StubHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the stub, which is not in the repository: each line of it follows from the functions."""
        Path(self.root, STUB).write_text(stub(Path(self.root)), encoding="utf-8")
        build_data["artifacts"].append(f"/{STUB}")


def stub(root: Path) -> str:
    """``flacompose.ops`` with an overload for each value of the flag that decides whether a state is returned."""
    package = ast.parse(Path(root, "flacompose/ops/__init__.py").read_text(encoding="utf-8"))
    lines, imports = [], {"from typing import Literal, overload", "import torch"}
    for imported in package.body:
        if not isinstance(imported, ast.ImportFrom) or not str(imported.module).startswith("flacompose.ops."):
            continue
        module = ast.parse(
            Path(root, f"{str(imported.module).replace('.', '/')}.py").read_text(encoding="utf-8")
        )
        origins = {y.name: x.module for x in module.body if isinstance(x, ast.ImportFrom) for y in x.names}
        for function in module.body:
            if isinstance(function, ast.FunctionDef) and function.name in {x.name for x in imported.names}:
                lines += [ast.unparse(x) for x in overloads(function)]
                types = [x.annotation for x in _parameters(function)] + [function.returns]
                names = {x.id for y in types if y is not None for x in ast.walk(y) if isinstance(x, ast.Name)}
                names -= {"torch", *dir(builtins)}
                imports |= {f"from {origins.get(x, imported.module)} import {x}" for x in names}
    return "\n".join(["# Made by hatch_build.py.", *sorted(imports), *lines, ""])


def overloads(function: ast.FunctionDef) -> list[ast.FunctionDef]:
    """The signatures of `function`: without a state, with one, and with a flag whose value is not known."""
    function.body = [ast.Expr(ast.Constant(...))]
    names = {x.arg for x in _parameters(function)}
    flags = FLAGS & names
    if not flags:
        return [function]
    (flag,) = flags
    both: Any = function.returns
    if isinstance(both, ast.BinOp):  # Tensor | tuple[...]
        nothing, state = both.left, both.right
    else:  # tuple[Tensor, State | None]
        output, states = both.slice.elts
        nothing, state = (
            ast.Subscript(both.value, ast.Tuple([output, x])) for x in (states.right, states.left)
        )
    without = _signature(function, nothing)
    for parameter in _parameters(without):
        if parameter.arg in (flag, "output_states"):
            parameter.annotation = ast.Name("Literal[False]" if parameter.arg == flag else "None")
    signatures = [without, _signature(function, state, flag, "Literal[True]")]
    if "output_states" in names:  # states are returned, whatever the flag is
        signatures.append(_signature(function, state, "output_states", "int"))
    return [*signatures, _signature(function, both)]


def _signature(
    function: ast.FunctionDef, returns: ast.expr, required: str | None = None, annotation: str = ""
) -> ast.FunctionDef:
    """The overload that returns `returns`, where the argument `required` is given.

    It is given by its name, since others before it have defaults.
    """
    overload = deepcopy(function)
    overload.decorator_list, overload.returns = [ast.Name("overload")], returns
    arguments = overload.args
    if required is None:
        return overload
    names = [x.arg for x in arguments.args]
    if required in names:
        since = names.index(required) - len(names)
        arguments.kwonlyargs[:0] = arguments.args[since:]
        arguments.kw_defaults[:0] = arguments.defaults[since:]
        del arguments.args[since:], arguments.defaults[since:]
    at = [x.arg for x in arguments.kwonlyargs].index(required)
    arguments.kwonlyargs[at].annotation = ast.Name(annotation)
    arguments.kw_defaults[at] = None
    return overload


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return function.args.args + function.args.kwonlyargs


if __name__ == "__main__":
    root = Path(__file__).parent
    (root / STUB).write_text(stub(root), encoding="utf-8")

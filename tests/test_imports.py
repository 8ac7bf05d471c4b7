"""No module imports itself by way of others, not even within a function; and the names of kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imported(path: Path, name: str, modules: dict[str, Path]) -> set[str]:
    """The `modules` that a file, the module `name`, imports; of ``from package import module`` the module alone."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            inside = {f"{source}.{alias.name}" for alias in node.names}
            found |= {full if full in modules else source for full in inside}
    return found & modules.keys()


@pytest.mark.parametrize("package", ["flacompose", "benchmarks"])
def test_no_circles(package: str) -> None:
    modules = {}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: imported(path, name, modules) for name, path in modules.items()}
    assert sum(map(len, graph.values())) > len(modules)  # the imports were found
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def device_functions() -> Iterator[ast.FunctionDef]:
    for path in (ROOT / "flacompose").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                ".jit" in ast.unparse(x) for x in node.decorator_list
            ):
                yield node


def kernels() -> Iterator[ast.FunctionDef]:
    return (node for node in device_functions() if node.name.endswith("_kernel"))


def test_kernels_have_names_of_their_own() -> None:
    """A profile shows a kernel by its name alone."""
    names = [node.name for node in kernels()]
    assert len(names) > 50 and len({*names}) == len(names), [x for x in names if names.count(x) > 1]


def test_kernels_have_few_parameters() -> None:
    """At most 25; what belongs together is a named tuple."""
    found = {node.name for node in kernels() if len(node.args.args) > 25}
    assert not found


def test_device_functions_return_tensors() -> None:
    """Triton 3.6 compiles no function that returns None, as an absent tensor or in a tuple."""

    def may_be_absent(x: ast.expr) -> bool:
        if isinstance(x, ast.IfExp):
            return may_be_absent(x.body) or may_be_absent(x.orelse)
        parts = x.elts if isinstance(x, ast.Tuple) else []
        return any(map(may_be_absent, parts)) or isinstance(x, ast.Constant) and x.value is None

    functions = [*device_functions()]
    returned = [(f.name, x.value) for f in functions for x in ast.walk(f) if isinstance(x, ast.Return)]
    assert len(functions) > 200 and not [name for name, x in returned if x is not None and may_be_absent(x)]

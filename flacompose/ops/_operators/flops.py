"""The FLOPs of the operators, for PyTorch's ``FlopCounterMode``.

Its module imports Triton, which takes as long as the rest of this package, and few programs count FLOPs. So
the formulas are registered when that module is imported, which has to be before a ``FlopCounterMode`` is
created: it copies the registered formulas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FLOP_COUNTER = "torch.utils.flop_counter"

_formulas: list[tuple[Any, Callable[..., int]]] = []


def count_flops(op: Any, formula: Callable[..., int]) -> None:
    """Register the formula of an operator now, or when PyTorch's counter is imported."""
    _formulas.append((op, formula))
    if hasattr(sys.modules.get(FLOP_COUNTER), "register_flop_formula"):
        sys.modules[FLOP_COUNTER].register_flop_formula(op)(formula)


class _AtImport(MetaPathFinder):
    """An import finder for the counter's module, which appends the registration of formulas."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != FLOP_COUNTER:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for op, formula in _formulas:
                    module.register_flop_formula(op)(formula)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


sys.meta_path.insert(0, _AtImport())

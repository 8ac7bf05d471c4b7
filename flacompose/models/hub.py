"""Names of repositories of the Hugging Face Hub. It does not import huggingface_hub, which is slow."""

from __future__ import annotations

import os
import re
from types import ModuleType


def is_of_hub(name: str | os.PathLike[str]) -> bool:
    """Whether `name` is no local path and has the form of a repository, "organisation/name"."""
    form = isinstance(name, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)
    return bool(form) and not os.path.exists(name)


def import_mixin(what: str) -> ModuleType:
    """Import `flacompose.models.hub_mixin`. If a package is missing, the error says that `what` needs it."""
    try:
        from flacompose.models import hub_mixin
    except ImportError as error:
        raise ImportError(
            f"{what} needs the packages huggingface_hub and safetensors: pip install huggingface_hub safetensors"
        ) from error
    return hub_mixin

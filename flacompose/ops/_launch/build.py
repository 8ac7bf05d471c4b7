"""Compilation of the C function that launches a kernel, which Triton 3.6 needs for each signature."""

from __future__ import annotations

import hashlib
import sysconfig
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from triton.backends.nvidia import driver
from triton.runtime import build
from triton.runtime.cache import get_cache_manager

NAME = "__triton_launcher"
# Kernels that differ only in constants share a launcher, which one thread compiles.
_locks: dict[str, Lock] = defaultdict(Lock)


def build_launcher(kernel: Any) -> None:
    """Compile the launcher now, in the calling thread, into Triton's cache.

    Triton would call the C compiler for one kernel after the other, which can take longer than to compile all
    kernels in parallel. Since Triton 3.7 one function launches every kernel, and this does nothing.
    """
    if not hasattr(driver, "make_launcher"):
        return
    source, names = kernel.src, kernel.src.fn.arg_names
    constants = {(names.index(x),) if isinstance(x, str) else x: y for x, y in source.constants.items()}
    described = getattr(kernel.metadata, "tensordesc_meta", None)
    code = driver.make_launcher(constants, dict(source.signature), described)
    key = hashlib.sha256((code + build.platform_key()).encode()).hexdigest()
    cache, file = get_cache_manager(key), NAME + sysconfig.get_config_var("EXT_SUFFIX")
    with _locks[key], TemporaryDirectory() as folder:
        if cache.get_file(file) is None:
            path = Path(folder, f"{NAME}.c")
            path.write_text(code)
            libraries = driver.library_dirs(), driver.include_dirs, driver.libraries
            built = build._build(NAME, str(path), folder, *libraries, [])
            cache.put(Path(built).read_bytes(), file, binary=True)

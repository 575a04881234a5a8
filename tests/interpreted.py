"""Kernels that Triton's interpreter runs, beside a process that may have imported Triton without it."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import pytest


@contextmanager
def interpreted(names: Sequence[str]) -> Iterator[dict[str, ModuleType]]:
    """Import modules whose `triton.jit` functions the interpreter runs; afterwards all is as before.

    Triton decides when a function is decorated, its own library functions included, so its Python modules are
    imported once more. Its compiled ones cannot be.
    """
    pytest.importorskip("triton")

    def concerned() -> list[str]:
        triton = [n for n in sys.modules if n.split(".")[0] == "triton" and not n.startswith("triton._C")]
        return triton + [n for n in sys.modules if n in names or n.startswith("csbp.kernels.")]

    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    before = {name: sys.modules.pop(name) for name in concerned()}
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        patch.undo()
        for name in concerned():
            del sys.modules[name]
        sys.modules.update(before)

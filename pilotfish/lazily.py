"""torch and numpy, imported when they are first used; and packages whose names are.

It does not know who uses them. The one trick: a flag's name and help text need no tensors, so what the command line
imports to learn its flags (option classes, drafters, and what those import) takes torch from here: `--help` and a
misspelt flag answer at once, not after the seconds that torch takes to load. There, types stand in quotes (`from
__future__ import annotations`). Everything else imports torch as usual.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any


class _Later:
    """Stands for a module until something of it is wanted."""

    def __init__(self, name: str):
        self._name = name
        self._module: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            self._module = importlib.import_module(self._name)
        return getattr(self._module, name)


if TYPE_CHECKING:
    import numpy as np
    import torch as torch
    import torch.nn.functional as functional
else:
    np, torch, functional = _Later("numpy"), _Later("torch"), _Later("torch.nn.functional")


def names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module-level ``__getattr__`` (PEP 562) for a package. homes: the submodule that each public name lives in."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return find


__all__ = ["functional", "names", "np", "torch"]

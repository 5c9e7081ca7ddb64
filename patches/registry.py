# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""How a patch is described, checked, applied to every alias, and undone.

A patch names one attribute of Megatron, says why no seam serves and which signature it expects.
Nothing is touched before every patch of the table fits, and `undo` puts the very same objects back.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

TESTED_MEGATRON = ">=0.19,<0.20"


class PatchError(RuntimeError):
    """A patch does not fit what is installed; the message names the symbol and the way out."""


@dataclass(frozen=True)
class Patch:
    """One attribute of Megatron that `enable()` wraps."""

    target: str
    """`module:attribute` or `module:Class.attribute`."""
    reason: str
    """Why no official seam serves."""
    parameters: tuple[str, ...]
    """Names of the parameters that the original must have, in order."""
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Makes the replacement from the original."""
    tested: str = TESTED_MEGATRON

    @property
    def module_name(self) -> str:
        return self.target.split(":")[0]

    def locate(self) -> tuple[Any, str, Callable[..., Any]]:
        """(owner, attribute name, current object); imports the module.

        Raises:
            PatchError: the module or the attribute does not exist.
        """
        module_name, path = self.target.split(":")
        try:
            owner: Any = importlib.import_module(module_name)
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            return owner, name, inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            raise PatchError(
                f"megatron_hdp cannot patch {self.target}: {error}; "
                f"install megatron-core {self.tested}."
            ) from error

    def found(self) -> tuple[str, ...]:
        """Parameter names of the object that stands there now (a wrapper's original's)."""
        _, _, current = self.locate()
        return tuple(inspect.signature(current).parameters)

    def fits(self) -> bool:
        try:
            return self.found() == self.parameters
        except PatchError:
            return False


@dataclass(frozen=True)
class Binding:
    """One name that was rebound: enough to undo it."""

    owner: Any
    name: str
    original: Any


@dataclass
class Applied:
    """A patch in force, with every name that it rebound."""

    patch: Patch
    original: Any
    replacement: Any
    bindings: list[Binding]


def check(patches: Iterable[Patch]) -> None:
    """Raises PatchError for the first patch whose target has another signature than expected."""
    for patch in patches:
        found = patch.found()
        if found != patch.parameters:
            raise PatchError(
                f"megatron_hdp cannot patch {patch.target}: it takes ({', '.join(found)}), but "
                f"({', '.join(patch.parameters)}) was expected; install megatron-core "
                f"{patch.tested}, or run `python -m megatron_hdp doctor`."
            )


def apply(patch: Patch) -> Applied:
    """Puts the replacement in place, and in every module that imported the original by value."""
    owner, name, original = patch.locate()
    replacement = patch.wrap(original)
    replacement.__hdp_original__ = original  # type: ignore[attr-defined]
    bindings = [Binding(owner, name, original)]
    setattr(owner, name, replacement)
    for module, alias in _aliases(original):
        bindings.append(Binding(module, alias, original))
        setattr(module, alias, replacement)
    return Applied(patch, original, replacement, bindings)


def undo(applied: Applied) -> None:
    """Puts the original back wherever the replacement stands, later imports by value included."""
    for binding in applied.bindings:
        setattr(binding.owner, binding.name, binding.original)
    for module, alias in _aliases(applied.replacement):
        setattr(module, alias, applied.original)


def _aliases(target: Any) -> Iterator[tuple[ModuleType, str]]:
    """Every (module, name) among the imported modules whose value is this very object."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(module, ModuleType) or names is None:
            continue
        for name, value in list(names.items()):
            if value is target:
                yield module, name

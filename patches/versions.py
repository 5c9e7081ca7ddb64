# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The versions that HDP runs on, checked before anything is patched."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_hdp.patches.registry import TESTED_MEGATRON, PatchError

REQUIRED = {"megatron-core": TESTED_MEGATRON, "torch": ">=2.11"}
OPTIONAL = (
    "transformer-engine",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "apex",
    "triton",
    "numpy",
)
PYTHON = (3, 12)


def installed(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def version_problems() -> list[str]:
    """One sentence for each requirement that is not met."""
    problems = []
    if sys.version_info < PYTHON:
        problems.append(f"Python {sys.version.split()[0]} is too old: use 3.12 or newer.")
    for package, wanted in REQUIRED.items():
        found = installed(package)
        if found is None:
            problems.append(f"{package} is not installed: pip install '{package}{wanted}'.")
        elif not SpecifierSet(wanted).contains(Version(found).base_version):
            problems.append(f"{package} {found} is not {wanted}: pip install '{package}{wanted}'.")
    return problems


def check_versions() -> None:
    """Raises PatchError with the first problem."""
    for problem in version_problems():
        raise PatchError(f"megatron_hdp: {problem}")

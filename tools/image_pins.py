# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What to install on top of a container image whose own packages stay as they are.

    python -m pip list --format=freeze > image.txt
    python tools/image_pins.py image.txt requirements-dev.txt > pins.txt
    python -m pip install -c image.txt -r pins.txt

A package of the image is kept, be it newer or older than our pin: torch, Transformer Engine, apex
and flash-attn were compiled against each other. Ours are the pins of what the image lacks.
"""

from __future__ import annotations

import argparse
import itertools
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def read_pins(file: Path) -> dict[str, str]:
    """{name: version} of a requirements file's `name==version` lines, and of those it includes."""
    pins: dict[str, str] = {}
    for line in file.read_text().splitlines():
        text = line.split("#")[0].strip()
        if text.startswith("-r "):
            pins |= read_pins(file.parent / text.removeprefix("-r ").strip())
        elif "==" in text:
            name, version = text.split("==", 1)
            pins[canonicalize_name(name)] = version
    return pins


def read_ranges(pyproject: Path) -> dict[str, SpecifierSet]:
    """{name: range} of what the package and its extras ask for."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    asked = map(Requirement, [*project["dependencies"], *extras])
    return {canonicalize_name(one.name): one.specifier for one in asked}


def lacking(
    image: dict[str, str], pins: dict[str, str], ranges: dict[str, SpecifierSet]
) -> list[str]:
    """The pins of what the image lacks, as requirement lines.

    Raises:
        ValueError: the image has a package in a version that the package's range excludes. A
            pre-release counts as what it is numbered: NGC's torch is one.
    """
    for name in pins.keys() & image.keys():
        allowed = ranges.get(name, SpecifierSet())
        if not allowed.contains(image[name], prereleases=True):
            raise ValueError(
                f"the image has {name} {image[name]}, but pyproject.toml asks for {allowed}:"
                " build on another base image"
            )
    return [f"{name}=={version}" for name, version in pins.items() if name not in image]


def main() -> None:
    """Prints the requirement lines; ends with one sentence where the image does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("image", type=Path, help="what `pip list --format=freeze` says there")
    parser.add_argument("requirements", type=Path, help="requirements.txt or requirements-dev.txt")
    options = parser.parse_args()
    try:
        lines = lacking(
            read_pins(options.image),
            read_pins(options.requirements),
            read_ranges(ROOT / "pyproject.toml"),
        )
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

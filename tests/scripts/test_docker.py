# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The Dockerfiles, as far as they can be checked without a daemon and NVIDIA's registry."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = ("Dockerfile", "Dockerfile.cpu")
NGC = {
    "torch": "2.13.0a0+9186a08b2c.nv26.7.59513937",
    "triton": "3.7.1+gitf797708c.nv26.7",
    "numpy": "2.1.0",
    "psutil": "7.0.0",
    "pytest": "8.1.1",
}
"""Of nvcr.io/nvidia/pytorch:26.07-py3; the last three stand for any that differ from our pins."""


def _instructions(name: str) -> list[tuple[str, str, str]]:
    """[(instruction, the rest on one line, comment above it)], in order."""
    found, comment, text = [], "", ""
    for line in (ROOT / name).read_text().splitlines():
        if not text and line.startswith("#"):
            comment += line.removeprefix("#")
        elif not text and not line.strip():
            comment = ""
        else:
            text += line.removesuffix("\\")
            if not line.endswith("\\"):
                word, rest = text.split(maxsplit=1)
                found.append((word, " ".join(rest.split()), comment))
                text = comment = ""
    return found


def _kept_from_the_context(path: Path) -> bool:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [rule.removeprefix("**/") for rule in rules if rule and not rule.startswith("#")]
    parts = path.relative_to(ROOT).parts
    return any(Path(part).match(pattern) for part in parts for pattern in patterns)


@pytest.mark.parametrize("name", FILES)
def test_what_a_dockerfile_names_is_there(name):
    told = _instructions(name)
    for word, rest, comment in told:
        # A second COPY may follow the line that the comment is about.
        assert comment or word == "COPY", f"{name}: why {word} {rest}?"
    sources = [Path(ROOT / source) for word, rest, _ in told if word == "COPY"
               for source in rest.split()[1:-1]]  # fmt: skip
    for source in sources:
        assert source.exists(), f"{name} copies {source}"
        assert not _kept_from_the_context(source), f".dockerignore hides {source}"
    users = [rest for word, rest, _ in told if word == "USER"]
    assert users
    assert int(users[-1]) > 0, "the container runs as root"
    command = json.loads(next(rest for word, rest, _ in told if word == "CMD"))
    assert command[0] == "python"
    if command[1] == "-m":
        assert importlib.util.find_spec(command[2])
    else:
        assert (ROOT / command[-1]).is_file()


def test_the_image_gets_what_it_lacks_and_keeps_its_torch(tmp_path):
    """Dockerfile's own line, by pip's own resolver, over an image and an index made of stubs."""
    run = next(rest for word, rest, _ in _instructions("Dockerfile") if word == "RUN"
               and "image_pins" in rest).replace("/tmp/", f"{tmp_path}/")  # fmt: skip
    environment = _stub_image(tmp_path)
    installed = _resolve(run, environment, tmp_path)
    assert installed["megatron-core"] == "0.19.2"
    assert installed.keys() & NGC.keys() == set(), "the image's own stay"
    assert "hypothesis" in installed, "tests inside"
    naive = _resolve("python -m pip install -r requirements.txt", environment, tmp_path)
    assert naive["torch"] == "2.13.0", "what the line is there to prevent"


def test_an_image_that_does_not_fit_is_one_sentence(tmp_path):
    image = tmp_path / "image.txt"
    image.write_text("torch==2.9.0a0+1.nv25.11\nnumpy==2.1.0\n")
    done = subprocess.run(
        [sys.executable, "tools/image_pins.py", image, "requirements.txt"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        "the image has torch 2.9.0a0+1.nv25.11, but pyproject.toml asks for >=2.11:"
        " build on another base image\n"
    )


def _resolve(line: str, environment: dict[str, str], folder: Path) -> dict[str, str]:
    """{name: version} of what a line with `pip install` would install."""
    report = folder / "report.json"
    subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=ROOT, check=True, timeout=120,
        env={**environment, "PIP_DRY_RUN": "1", "PIP_REPORT": str(report)},
    )  # fmt: skip
    told = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {canonicalize_name(one["name"]): one["version"] for one in told}


def _stub_image(folder: Path) -> dict[str, str]:
    """A Python that has pip and what NGC has; an index that has this environment's packages.

    Their metadata is real, their content is left out. Returns the environment to run `python` in.
    """
    image, index = folder / "image", folder / "index"
    image.mkdir()
    index.mkdir()
    for name, version in NGC.items():
        info = image / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    site = sysconfig.get_path("purelib")  # sys.path may also hold what setuptools vendors
    for one in importlib.metadata.distributions(path=[site]):
        name = one.metadata["Name"]
        if name in ("pip", "packaging"):
            for path in (Path(site, name), next(Path(site).glob(f"{name}-*.dist-info"))):
                (image / path.name).symlink_to(path)
        elif name != "megatron_hdp":
            _stub_wheel(index, one)
    venv.create(folder / "venv", with_pip=False)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return kept | {
        "PATH": f"{folder}/venv/bin:{os.environ['PATH']}", "PYTHONPATH": str(image),
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull,
    }  # fmt: skip


def _stub_wheel(index: Path, one: importlib.metadata.Distribution) -> None:
    stem = f"{re.sub('[-_.]+', '_', one.metadata['Name'])}-{one.version}"
    with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", one.read_text("METADATA") or "")
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{stem}.dist-info/WHEEL", tag)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")

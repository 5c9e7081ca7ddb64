# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""GPUs and what joins them: nvidia-smi's link matrix, and the kernel's list of InfiniBand ports."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from megatron_hdp.cli.machine.check import Check

_PORTS = Path("/sys/class/infiniband")
_LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe over the CPU",
    "NODE": "PCIe over the CPU",
    "SYS": "PCIe and the CPUs' interconnect",
}
"""Words for the legend of `nvidia-smi topo -m`."""


def gpu_checks() -> list[Check]:
    """Devices, links between them, network adapters; one line says so where there is no GPU."""
    import torch

    from megatron_hdp import cpu

    if cpu.is_installed() or not torch.cuda.is_available():
        return [Check("GPUs", "none visible: only --hdp-cpu runs here")]
    names = Counter(
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
        f"{properties.major}.{properties.minor}"
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    )
    found = "; ".join(f"{count} x {name}" for name, count in names.items())
    checks = [Check("GPUs", found)]
    if torch.cuda.device_count() > 1:
        checks.append(_link_check())
    return checks


def _link_check() -> Check:
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check("GPU links", f"unknown ({error})", "make nvidia-smi runnable, then ask again.")
    return judge_links(parse_topology(done.stdout))


def parse_topology(matrix: str) -> Counter[str]:
    """Kind of link (`NV18`, `PIX`, `SYS`, ...) -> GPU pairs, from `nvidia-smi topo -m`."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = [line.split() for line in plain.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0"), [])
    count = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in header)
    kinds: Counter[str] = Counter()
    for row in rows:
        if len(row) > count and re.fullmatch(r"GPU\d+", row[0]) and row != header:
            own = int(row[0].removeprefix("GPU"))
            kinds.update(row[own + 2 : count + 1])
    return kinds


def judge_links(kinds: Counter[str]) -> Check:
    """Rings send over these links; PCIe between GPUs is right, and slow."""
    if not kinds:
        return Check("GPU links", "unknown: nvidia-smi topo -m shows no pair of GPUs")
    words = []
    for kind, pairs in sorted(kinds.items()):
        name = _LINKS.get("NV" if kind.startswith("NV") else kind, kind)
        words.append(f"{pairs} pairs by {name} ({kind})")
    slow = [kind for kind in kinds if not kind.startswith("NV")]
    advice = (
        "rings over PCIe hide less of their transfers: plan with a --profile of this machine."
        if slow else ""
    )  # fmt: skip
    return Check("GPU links", ", ".join(words), advice)


class Port(NamedTuple):
    """One port of a network adapter."""

    name: str
    description: str
    active: bool


def network_ports(folder: Path = _PORTS) -> list[Port]:
    """InfiniBand and RoCE ports as the kernel lists them."""
    ports = []
    for path in sorted(folder.glob("*/ports/*")):
        state = _read(path / "state").partition(": ")[2] or "unknown"
        name = f"{path.parent.parent.name}:{path.name}"
        description = f"{name} {_read(path / 'link_layer')} {_read(path / 'rate')} {state}"
        ports.append(Port(name, description, state == "ACTIVE"))
    return ports


def judge_network(ports: list[Port]) -> Check:
    """Rings across nodes need every port."""
    if not ports:
        return Check("network adapters", "no InfiniBand or RoCE: nodes would talk over TCP")
    down = ", ".join(port.name for port in ports if not port.active)
    advice = f"{down} not ACTIVE: bring it up, or leave it out with NCCL_IB_HCA." if down else ""
    return Check("network adapters", "; ".join(port.description for port in ports), advice)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

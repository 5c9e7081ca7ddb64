# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Environment variables of NCCL and torch that change how HDP runs, and whether it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron_hdp.cli.machine.check import Check


class _Off(NamedTuple):
    name: str
    bad: str
    why: str


_OFF = (
    _Off("NCCL_P2P_DISABLE", "1", "rings inside a node then go over the host's memory"),
    _Off("NCCL_SHM_DISABLE", "1", "ranks of a node without NVLink then talk over the network"),
    _Off("NCCL_IB_DISABLE", "1", "rings across nodes then go over TCP"),
    _Off("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "a lost rank then hangs the others for ever"),
    _Off("CUDA_LAUNCH_BLOCKING", "1", "no transfer then hides behind compute"),
)
_SHOWN = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def setting_checks(
    environment: Mapping[str, str], interfaces: Iterable[str], *, has_gpu: bool
) -> list[Check]:
    """The settings that are made, and those that should be.

    Args:
        environment: os.environ.
        interfaces: names of this machine's network interfaces.
        has_gpu: without one nothing of NCCL is asked for.
    """
    checks = [
        Check(rule.name, rule.bad, f"unset {rule.name}: {rule.why}.")
        for rule in _OFF
        if environment.get(rule.name) == rule.bad
    ]
    checks += [Check(name, environment[name]) for name in _SHOWN if name in environment]
    checks += _unknown_interface(environment.get("NCCL_SOCKET_IFNAME", ""), list(interfaces))
    if has_gpu:
        checks += [_connections(environment), _allocator(environment)]
    return checks or [Check("NCCL settings", "none set")]


def _unknown_interface(wanted: str, interfaces: list[str]) -> list[Check]:
    """NCCL takes prefixes, `=name` for a whole name and `^name` for all others."""
    if not wanted or wanted[0] == "^":
        return []
    whole = wanted[0] == "="
    names = wanted.lstrip("=").split(",")
    if any(
        have == name if whole else have.startswith(name) for name in names for have in interfaces
    ):
        return []
    advice = f"no interface fits: set NCCL_SOCKET_IFNAME to one of {', '.join(interfaces)}."
    return [Check("network interface", f"none like {wanted}", advice)]


def _connections(environment: Mapping[str, str]) -> Check:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    found = environment.get(name, "not set")
    advice = (
        "" if found == "1"
        else f"export {name}=1: Megatron's overlap under TP and CP needs it before Blackwell."
    )  # fmt: skip
    return Check(name, found, advice)


def _allocator(environment: Mapping[str, str]) -> Check:
    found = next((environment[name] for name in _ALLOCATOR if name in environment), "not set")
    advice = (
        "" if "expandable_segments:True" in found
        else f"export {_ALLOCATOR[0]}=expandable_segments:True: micro-batches differ in size, "
        "which fragments the device's memory without it."
    )  # fmt: skip
    return Check(_ALLOCATOR[0], found, advice)

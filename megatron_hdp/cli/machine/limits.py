# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Limits of this shell and machine that end a run with somebody else's error message."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from megatron_hdp.cli.machine.check import Check

GIB = 2**30
LEAST_FILES = 4096
"""A rank holds a socket per peer and channel, index files and its workers' pipes."""
LEAST_PROCESSES = 4096
"""Threads count too: each rank has about a hundred, of torch, NCCL and loaders."""
LEAST_SHARED = GIB
"""NCCL's buffers between ranks of a node, and loader workers; docker gives 64 MiB."""
HOST_SHARE = 0.9
"""Of the host's memory that pinned slabs may take together."""
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def limit_checks(*, has_network: bool) -> list[Check]:
    """memlock, nofile and nproc of this shell, and /dev/shm.

    Args:
        has_network: whether there is InfiniBand, whose memory must be locked.
    """
    return [
        _memlock(has_network),
        _at_least("nofile", "-n", resource.RLIMIT_NOFILE, LEAST_FILES),
        _at_least("nproc", "-u", resource.RLIMIT_NPROC, LEAST_PROCESSES),
        shared_memory_check("/dev/shm"),
    ]


def _memlock(has_network: bool) -> Check:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    bad = has_network and limit != resource.RLIM_INFINITY
    advice = (
        "InfiniBand needs `ulimit -l unlimited` (docker run --ulimit memlock=-1)." if bad else ""
    )
    return Check("ulimit memlock", _number(limit, 2**20, " MiB"), advice)


def _at_least(name: str, flag: str, kind: int, least: int) -> Check:
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft >= least:
        return Check(f"ulimit {name}", _number(soft))
    enough = hard == resource.RLIM_INFINITY or hard >= least
    way = f"run `ulimit {flag} {least}` first" if enough else f"the hard limit is {hard}: raise it"
    return Check(f"ulimit {name}", _number(soft), f"{soft} {name} is little for a rank: {way}.")


def _number(value: int, unit: int = 1, name: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value / unit:.6g}{name}"


def shared_memory_check(path: str) -> Check:
    """Size of the shared-memory file system."""
    try:
        total = shutil.disk_usage(path).total
    except OSError as error:
        return Check(path, f"none ({error})", f"mount {path}: NCCL and loader workers need it.")
    short = total < LEAST_SHARED
    return Check(
        path,
        f"{total / GIB:.2f} GiB",
        f"{path} is small: docker run --ipc=host, or --shm-size 8g." if short else "",
    )


def host_memory() -> int:
    """Bytes that this process may have: the machine's, or its container's or job's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return min(limits)


def offload_check(host_memory_gib: float, local_ranks: int, have: int) -> Check:
    """Whether `--hdp-host-memory` of every rank of this host fits `have` bytes."""
    need = host_memory_gib * GIB * local_ranks
    found = (
        f"{have / GIB:.0f} GiB; --hdp-host-memory {host_memory_gib:g} x {local_ranks} local ranks "
        f"is {need / GIB:.0f} GiB"
    )
    if need <= HOST_SHARE * have:
        return Check("host memory for offload", found)
    fitting = int(HOST_SHARE * have / GIB / local_ranks)
    way = f"give --hdp-host-memory {fitting}" if fitting else "this host is too small for offload"
    return Check("host memory for offload", found, f"with --hdp-offload {way}.")

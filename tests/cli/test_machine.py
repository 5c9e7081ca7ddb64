# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What doctor says of limits, links and settings; each check speaks up, and is silent, in turn."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_hdp.cli.machine.gpus import judge_links, judge_network, network_ports, parse_topology
from megatron_hdp.cli.machine.limits import GIB, offload_check, shared_memory_check
from megatron_hdp.cli.machine.settings import setting_checks

MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tSYS\tSYS\t0-47\t0
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_links_are_counted_once_a_pair():
    kinds = parse_topology(MATRIX)
    assert kinds == {"NV18": 1, "SYS": 2}
    assert "1 pairs by NVLink (NV18)" in judge_links(kinds).found
    assert "PCIe" in judge_links(kinds).advice
    assert judge_links({"NV18": 28}).advice == ""
    assert parse_topology("") == {}


def _port(folder, name, state):
    port = folder / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")


def test_network_ports(tmp_path):
    assert network_ports(tmp_path) == []
    assert "TCP" in judge_network([]).found
    _port(tmp_path, "mlx5_0", "4: ACTIVE")
    assert judge_network(network_ports(tmp_path)).advice == ""
    _port(tmp_path, "mlx5_1", "1: DOWN")
    check = judge_network(network_ports(tmp_path))
    assert "mlx5_0:1 InfiniBand 400 Gb/sec (4X NDR) ACTIVE" in check.found
    assert check.advice.startswith("mlx5_1:1 not ACTIVE")


@pytest.mark.parametrize(
    ("environment", "has_gpu", "words"),
    [
        ({}, False, []),
        ({"NCCL_IB_DISABLE": "1"}, False, ["unset NCCL_IB_DISABLE"]),
        ({"NCCL_IB_DISABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, False, []),
        ({"NCCL_SOCKET_IFNAME": "eth"}, False, []),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, False, ["one of lo, eth0"]),
        ({"NCCL_SOCKET_IFNAME": "^ib"}, False, []),
        ({"NCCL_SOCKET_IFNAME": "bond0"}, False, ["one of lo, eth0"]),
        ({}, True, ["CUDA_DEVICE_MAX_CONNECTIONS=1", "expandable_segments:True"]),
        (
            {
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
            True,
            [],
        ),
    ],
)
def test_settings(environment, has_gpu, words):
    checks = setting_checks(environment, ["lo", "eth0"], has_gpu=has_gpu)
    advice = [check.advice for check in checks if check.advice]
    assert len(advice) == len(words)
    assert all(word in text for word, text in zip(words, advice, strict=True))


def test_memory(tmp_path):
    assert offload_check(10, 8, 100 * GIB).advice == ""
    assert "give --hdp-host-memory 11." in offload_check(12, 8, 100 * GIB).advice
    assert "too small" in offload_check(12, 200, 100 * GIB).advice
    assert "mount" in shared_memory_check(str(tmp_path / "none")).advice


def test_limits_of_the_shell():
    """Real limits, in a process that has lowered its own."""
    code = """
import resource
from megatron_hdp.cli.machine.limits import limit_checks
for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
    resource.setrlimit(kind, (256, resource.getrlimit(kind)[1]))
for has_network in (False, True):
    print([check.name for check in limit_checks(has_network=has_network) if check.advice])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    without, with_network = done.stdout.splitlines()
    assert "ulimit nofile" in without
    assert "ulimit memlock" not in without
    assert "ulimit memlock" in with_network

# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What `--hdp-loader ray` needs, checked before any process group exists. Imports no Ray."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket

_PATIENCE_S = 5.0


def loader_refusals(args: argparse.Namespace) -> list[str]:
    """Sentences that name flag, value and way out."""
    loader = getattr(args, "hdp_loader", "local")
    address = getattr(args, "hdp_ray_address", None)
    servers = getattr(args, "hdp_loader_servers", 1)
    if loader != "ray":
        if address is None:
            return []
        return [
            f"--hdp-ray-address {address}: it needs --hdp-loader ray: add that, or leave it out."
        ]
    if importlib.util.find_spec("ray") is None:
        return [
            "--hdp-loader ray: Ray is not installed: pip install 'megatron_hdp[ray]', or use "
            "--hdp-loader local."
        ]
    if servers < 1:
        return [f"--hdp-loader-servers {servers}: give at least 1."]
    if address is not None:
        return _address_refusals(address)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if here < world:
        return [
            f"--hdp-loader ray with {world} ranks of which {here} are on this node: start a Ray "
            f"cluster over the nodes (ray start) and give its --hdp-ray-address."
        ]
    return []


def _address_refusals(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return [f"--hdp-ray-address {address}: give host:port, as ray start prints it."]
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
    except (OSError, OverflowError) as error:
        return [
            f"--hdp-ray-address {address}: nothing answers there ({error}): start the cluster "
            f"first, or leave it out to start one on this machine."
        ]
    return []

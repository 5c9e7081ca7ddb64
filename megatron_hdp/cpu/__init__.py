# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron on a CPU over gloo: try a launch line on a laptop, run the tests without a GPU.

Only on request (`install()`, or `--hdp-cpu` on the command line), before Megatron is imported, and
never where a GPU is.
"""

from __future__ import annotations

import sys

_installed = False


def install() -> None:
    """Makes torch.cuda look like this machine's CPU, and Megatron run on it. Idempotent.

    Raises:
        RuntimeError: a GPU is there, or Megatron was imported before.
    """
    global _installed
    if _installed:
        return
    import torch

    if torch.cuda.is_available():
        raise RuntimeError("--hdp-cpu is for machines without a GPU: leave it out here.")
    if any(name.split(".")[0] == "megatron" for name in sys.modules):
        raise RuntimeError(
            "megatron_hdp.cpu.install() must come before the first import of megatron: move it, or "
            "put --hdp-cpu on the command line and call megatron_hdp.enable() first."
        )
    from megatron_hdp.cpu import stand_ins, upstream_faults

    upstream_faults.stand_in_for_triton()
    stand_ins.install()
    upstream_faults.handle_all()
    _installed = True


def is_installed() -> bool:
    """Whether `install()` ran in this process."""
    return _installed

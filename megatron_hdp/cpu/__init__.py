# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron on a CPU over gloo: try a launch line on a laptop, run the tests without a GPU.

Only on request (`install()`, or `--hdp-cpu` on the command line), before Megatron is imported, and
never where a GPU is. `docs/cpu.md` says what it does and what it cannot do.
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
        raise RuntimeError(
            f"--hdp-cpu is for machines without a GPU, and this one has "
            f"{torch.cuda.get_device_name(0)}: leave it out, or hide the GPU with "
            f"CUDA_VISIBLE_DEVICES=''."
        )
    early = sorted(name for name in sys.modules if name.startswith("megatron."))
    if early:
        raise RuntimeError(
            f"--hdp-cpu comes too late, {early[0]} is imported already: call "
            f"megatron_hdp.enable() or megatron_hdp.cpu.install() before the first Megatron import."
        )
    from megatron_hdp.cpu import faults, stand_ins

    stand_ins.install()
    faults.handle_needed(cpu_mode=True)
    _installed = True


def is_installed() -> bool:
    """Whether `install()` ran in this process."""
    return _installed

# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Hybrid Data Parallelism (ByteScale, arXiv 2502.21231) as a plugin on released Megatron-Core.

`enable()` in front of a Megatron training script is enough; nothing happens at import.
"""

from __future__ import annotations

import sys
from typing import Any

__version__ = "0.1.0"


def enable(**options: Any) -> None:
    """Turns HDP on for the Megatron training script that follows.

    Applies every patch of `megatron_hdp.patches` or none; idempotent. With `--hdp-cpu` on the
    command line Megatron is first made to run on this machine's CPU.

    Args:
        **options: defaults of the `--hdp-*` arguments, by the field names of
            `megatron_hdp.runtime.options.HdpOptions` (capacity=8192, strategy="static", ...).

    Raises:
        PatchError: the installed Megatron is not one that the patches fit.
        RuntimeError: `--hdp-cpu` was given after Megatron was imported, or with a GPU there.
    """
    if "--hdp-cpu" in sys.argv[1:]:
        from megatron_hdp import cpu

        cpu.install()
    from megatron_hdp.patches import apply_all
    from megatron_hdp.patches.versions import check_versions

    check_versions()
    from megatron_hdp.observability.step_log import StepLog
    from megatron_hdp.runtime import session
    from megatron_hdp.runtime.options import HdpOptions

    session.start(HdpOptions(**options)).log_step = StepLog()
    apply_all()


def disable() -> None:
    """Undoes `enable()`: every patched symbol is the very same object as before. Idempotent."""
    from megatron_hdp.patches import undo_all
    from megatron_hdp.runtime import session

    undo_all()
    session.stop()


__all__ = ["__version__", "disable", "enable"]

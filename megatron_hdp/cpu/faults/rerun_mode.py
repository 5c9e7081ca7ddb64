# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`--rerun-mode report_stats` is offered under a name that the enum does not have."""

from __future__ import annotations

from typing import Any

from megatron_hdp.cpu.faults.fault import Fault

_OFFERED = "report_stats"


def _needed() -> bool:
    from megatron.core.rerun_state_machine import RerunMode

    try:
        RerunMode(_OFFERED)
    except ValueError:
        return True
    return False


def _handle() -> None:
    from megatron.core.rerun_state_machine import RerunMode

    def missing(cls: Any, value: object) -> Any:
        return cls.REPORT_DETERMINISM_STATS if value == _OFFERED else None

    RerunMode._missing_ = classmethod(missing)  # type: ignore[assignment,method-assign]


FAULT = Fault(
    symbol="megatron.core.rerun_state_machine:RerunMode",
    seen="ValueError: 'report_stats' is not a valid RerunMode",
    where="any machine, GPUs too",
    needed=_needed,
    handle=_handle,
)

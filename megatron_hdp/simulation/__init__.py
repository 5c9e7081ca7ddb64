# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Event simulation of a plan on a described cluster. NumPy only; planning knows nothing of it."""

from __future__ import annotations

from megatron_hdp.simulation.cluster import Cluster
from megatron_hdp.simulation.engine import DeadlockError
from megatron_hdp.simulation.model import ModelShape
from megatron_hdp.simulation.step import Job, Simulation, simulate

__all__ = ["Cluster", "DeadlockError", "Job", "ModelShape", "Simulation", "simulate"]

# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The `--hdp` argument group and the values it becomes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace

from megatron_hdp import cpu
from megatron_hdp.cpu.arguments import set_cpu_defaults
from megatron_hdp.data.long_documents import LONG_DOCUMENTS
from megatron_hdp.runtime.attention.kernels import TRANSFORMER_ENGINE
from megatron_hdp.runtime.attention.support import HEAD_PARALLEL
from megatron_hdp.runtime.help_text import repair_help

LOADERS = ("local", "ray")
STRATEGIES = ("auto", "dp-balance", "pp-balance", "naive", "static")
CROSS_ENTROPIES = ("auto", "fused", "chunked", "megatron")


@dataclass(frozen=True)
class HdpOptions:
    """What the user asked of HDP. Field names are the arguments' without `hdp_`."""

    strategy: str = "auto"
    """The planner: auto (ours), the paper's dp-balance, pp-balance and naive, or static."""
    capacity: int | None = None
    """Tokens per rank in one micro-batch; None: seq_length / context_parallel_size."""
    attention: str = "auto"
    """The attention kernel under the ring; auto takes the best that this machine has."""
    te_groups: int = 64
    """Rings that may have a process group at a time; only for Transformer Engine's attention."""
    head_parallel: str = "off"
    """Whether rings may split heads among their members: off, or auto (where it pays)."""
    cross_entropy: str = "auto"
    """The loss: fused (Triton), chunked, megatron, or auto (megatron where that fits)."""
    cross_entropy_chunk: int = 1024
    """Tokens whose logits the chunked loss holds at a time."""
    label_smoothing: float = 0.0
    """Megatron's label smoothing, in training."""
    z_loss: float = 0.0
    """Coefficient of logsumexp^2 in each token's loss, in training."""
    device_memory: float | None = None
    """GiB of a rank's device, for the check of capacity and loss; None: what it has."""
    loader: str = "local"
    """Who reads: local (each rank its own files) or ray (servers, a scheduler, clients)."""
    loader_servers: int = 2
    """Servers of the ray loader."""
    ray_address: str | None = None
    """host:port of a Ray cluster to join; None: one is started on this machine."""
    plan_ahead: int = 2
    """Steps that the planning process works ahead of training; 0 plans in the step itself."""
    profile: str | None = None
    """A cost-model profile (JSON) or preset; None: the preset named in the start-up line."""
    offload: bool = False
    """Whether the planner may send activations to the host."""
    offload_ratio: float | None = None
    """A share that every micro-batch offloads, instead of planned ones; None: as planned."""
    host_memory: float = 128.0
    """GiB of host memory per rank for offloaded activations."""
    long_documents: str = "fail"
    """What becomes of documents longer than --seq-length: fail, cut or drop."""
    malformed_records: str = "fail"
    """What becomes of malformed records of text: fail or skip."""
    text_key: str = "text"
    """The field of a record that holds a document's text."""
    timeout_minutes: float = 10.0
    """How long a rank waits for another one in a ring or in the plan comparison."""
    trace: str | None = None
    """A folder for per-rank step records (JSON lines); None: none are written."""

    @property
    def uses_transformer_engine(self) -> bool:
        """Whether rings run in Transformer Engine's attention, over process groups."""
        return self.attention == TRANSFORMER_ENGINE

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> HdpOptions:
        values = {
            f.name: getattr(args, f"hdp_{f.name}")
            for f in fields(cls)
            if hasattr(args, f"hdp_{f.name}")
        }
        return replace(cls(), **values)


def add_hdp_arguments(
    parser: argparse.ArgumentParser, defaults: HdpOptions | None = None
) -> argparse.ArgumentParser:
    """Adds the `hdp` group; usable as Megatron's `extra_args_provider`. Idempotent."""
    repair_help(parser)
    if "--hdp" in parser._option_string_actions:
        return parser
    add_hdp_group(parser, defaults or HdpOptions())
    if cpu.is_installed():
        set_cpu_defaults(parser)
    return parser


def add_hdp_group(parser: argparse.ArgumentParser, default: HdpOptions) -> argparse._ArgumentGroup:
    """The flags alone, whatever parser it is and wherever this process trains."""
    group = parser.add_argument_group(title="hdp")
    group.add_argument(
        "--hdp", action="store_true", help="Train with Hybrid Data Parallelism (megatron_hdp)."
    )
    group.add_argument(
        "--hdp-cpu",
        action="store_true",
        help="Run on this machine's CPU over gloo; must be on the command line itself.",
    )
    group.add_argument(
        "--hdp-strategy",
        choices=STRATEGIES,
        default=default.strategy,
        help="Planner of the micro-batches.",
    )
    group.add_argument(
        "--hdp-capacity",
        type=int,
        default=default.capacity,
        help="Tokens per rank in one micro-batch; default seq-length / context-parallel-size.",
    )
    group.add_argument(
        "--hdp-attention",
        default=default.attention,
        help="Attention kernel under the ring (auto, or a name that doctor lists), or "
        "transformer_engine to run rings in its attention.",
    )
    group.add_argument(
        "--hdp-te-groups",
        type=int,
        default=default.te_groups,
        help="Rings that may have a process group at a time, with --hdp-attention "
        "transformer_engine.",
    )
    group.add_argument(
        "--hdp-head-parallel",
        choices=HEAD_PARALLEL,
        default=default.head_parallel,
        help="auto: rings split heads among members where that sends less and is not slower.",
    )
    _add_loss_arguments(group, default)
    _add_loader_arguments(group, default)
    group.add_argument(
        "--hdp-plan-ahead",
        type=int,
        default=default.plan_ahead,
        help="Steps planned (and with --hdp-loader ray fetched) ahead; 0 plans in the step itself.",
    )
    group.add_argument(
        "--hdp-profile",
        default=default.profile,
        help="Cost-model profile (JSON) that replaces the preset.",
    )
    group.add_argument(
        "--hdp-offload",
        action="store_true",
        default=default.offload,
        help="Let the planner send a share of a micro-batch's activations to the host.",
    )
    group.add_argument(
        "--hdp-offload-ratio",
        type=float,
        default=default.offload_ratio,
        help="Offload this share (0 to 1) in every micro-batch; plans stay as without offload.",
    )
    group.add_argument(
        "--hdp-host-memory",
        type=float,
        default=default.host_memory,
        help="GiB of host memory per rank for offloaded activations; past it they stay.",
    )
    _add_data_arguments(group, default)
    group.add_argument(
        "--hdp-timeout-minutes",
        type=float,
        default=default.timeout_minutes,
        help="How long a rank waits for another in a ring or in the plan comparison.",
    )
    group.add_argument(
        "--hdp-trace",
        default=default.trace,
        help="Folder for per-rank step records (JSON lines) that tools/trace.py merges and draws.",
    )
    return group


def _add_data_arguments(group: argparse._ArgumentGroup, default: HdpOptions) -> None:
    group.add_argument(
        "--hdp-long-documents",
        choices=LONG_DOCUMENTS,
        default=default.long_documents,
        help="What becomes of documents longer than seq-length; cut loses no token.",
    )
    group.add_argument(
        "--hdp-malformed-records",
        choices=("fail", "skip"),
        default=default.malformed_records,
        help="What becomes of malformed records of .jsonl, .parquet and the like.",
    )
    group.add_argument(
        "--hdp-text-key",
        default=default.text_key,
        help="The field of such a record that holds a document's text.",
    )


def _add_loader_arguments(group: argparse._ArgumentGroup, default: HdpOptions) -> None:
    group.add_argument(
        "--hdp-loader",
        choices=LOADERS,
        default=default.loader,
        help="local: each rank reads its own tokens; ray: servers read for all ranks.",
    )
    group.add_argument(
        "--hdp-loader-servers",
        type=int,
        default=default.loader_servers,
        help="Servers of --hdp-loader ray, a CPU each; the scheduler takes one more.",
    )
    group.add_argument(
        "--hdp-ray-address",
        default=default.ray_address,
        help="host:port of a Ray cluster to join; without it one is started on this machine.",
    )


def _add_loss_arguments(group: argparse._ArgumentGroup, default: HdpOptions) -> None:
    group.add_argument(
        "--hdp-device-memory",
        type=float,
        default=default.device_memory,
        help="GiB of a rank's device that capacity and loss are checked against; default its own.",
    )
    group.add_argument(
        "--hdp-cross-entropy",
        choices=CROSS_ENTROPIES,
        default=default.cross_entropy,
        help="Loss over the vocabulary; auto is Megatron's own unless it would not fit in memory.",
    )
    group.add_argument(
        "--hdp-cross-entropy-chunk",
        type=int,
        default=default.cross_entropy_chunk,
        help="Tokens whose logits the chunked loss holds at a time.",
    )
    group.add_argument(
        "--hdp-label-smoothing",
        type=float,
        default=default.label_smoothing,
        help="Label smoothing of the training loss; needs the fused or the chunked loss.",
    )
    group.add_argument(
        "--hdp-z-loss",
        type=float,
        default=default.z_loss,
        help="Coefficient of logsumexp^2 in the training loss; needs the fused or chunked loss.",
    )

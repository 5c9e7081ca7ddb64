# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Gives the data iterators their loaders, from the options of a Megatron launch line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from megatron_hdp.data.loading.loader import Loader, Share
from megatron_hdp.data.loading.local import LocalLoader
from megatron_hdp.data.requests import StepRequests, Steps
from megatron_hdp.data.sources import PackSource
from megatron_hdp.planning import PlannerConfig
from megatron_hdp.planning.values import Plan
from megatron_hdp.runtime.options import HdpOptions
from megatron_hdp.runtime.planner import make_planner
from megatron_hdp.runtime.session import Session
from megatron_hdp.runtime.step import StreamConfig
from megatron_hdp.runtime.waiting import waiting

if TYPE_CHECKING:
    from megatron_hdp.data.remote.cluster import Cluster

_KEY = "hdp/loader"
_FAILED = "failed: "


class StreamData(NamedTuple):
    """What train, valid or test reads."""

    steps: Steps
    source: PackSource
    config: StreamConfig


def make_loaders(
    streams: Mapping[str, StreamData], config: PlannerConfig, session: Session
) -> dict[str, Loader]:
    """A loader for every stream. With `ray`, every rank of the world must call this.

    Raises:
        LoaderUnavailable, CorpusError: Ray or the data cannot be had; on every rank.
    """
    options = session.options
    if options.loader == "local":
        return {name: _local(data, config, options) for name, data in streams.items()}

    from megatron_hdp.data.remote.client import RayLoader

    session.loader_cluster = _meet(streams, config, options)
    return {
        name: RayLoader(
            session.loader_cluster,
            data.steps,
            data.source,
            shares_of=partial(_shares, data.config),
            number=data.config.rank,
            rank=dist.get_rank(),
            depth=options.plan_ahead,
            timeout_s=60 * options.timeout_minutes,
        )
        for name, data in streams.items()
    }


def _shares(config: StreamConfig, plan: Plan) -> Sequence[Share]:
    return config.layouts(plan.micro_batches(config.rank))


def _local(data: StreamData, config: PlannerConfig, options: HdpOptions) -> Loader:
    requests = StepRequests(data.steps, data.source.lengths)
    return LocalLoader(data.source, make_planner(config, requests, options), data.steps)


def _meet(streams: Mapping[str, StreamData], config: PlannerConfig, options: HdpOptions) -> Cluster:
    """Rank 0 starts the loader's roles, the others learn from it where they are."""
    from megatron_hdp.data.remote import cluster

    timeout_s = 60 * options.timeout_minutes
    wanted = cluster.ClusterOptions(
        options.ray_address, options.loader_servers, options.plan_ahead, timeout_s
    )
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        known = {name: cluster.Stream(data.steps, config) for name, data in streams.items()}
        sources = {name: data.source for name, data in streams.items()}
        try:
            started, where = cluster.start(wanted, known, sources)
        except (cluster.LoaderUnavailable, ValueError) as error:
            store.set(_KEY, _FAILED + str(error))
            raise
        store.set(_KEY, where)
        return started
    with waiting("rank 0 to start the loader's servers and scheduler"):
        store.wait([_KEY], timedelta(seconds=2 * timeout_s))
    where = store.get(_KEY).decode()
    if where.startswith(_FAILED):
        raise cluster.LoaderUnavailable(f"rank 0: {where.removeprefix(_FAILED)}")
    return cluster.join(where)

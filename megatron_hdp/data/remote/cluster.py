# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The Ray cluster of a job: joined by address, or started here and ended with the job."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hdp.data.remote.asking import Actors, cause_of
from megatron_hdp.data.remote.head import Head
from megatron_hdp.data.remote.scheduler import Scheduler, Stream
from megatron_hdp.data.remote.server import RoleStatus, Server
from megatron_hdp.data.remote.shipping import pack

_READERS = 16
"""Slices that one server reads at once."""
_CALLS = 64
"""Requests that one server works on at once; others wait in its queue."""


class LoaderUnavailable(RuntimeError):
    """Ray cannot be started or joined; the message says what to do."""


@dataclass(frozen=True)
class ClusterOptions:
    """How to start the loader's roles."""

    address: str | None
    """Of a cluster that exists; None starts one on this machine."""
    servers: int
    ahead: int
    """Steps that the scheduler plans beyond the newest that was asked for."""
    timeout_s: float


class Cluster:
    """This process's connection to the loader's actors.

    Args:
        scheduler, servers: Ray's handles.
        sources: the reference that servers are made from; Ray forgets what nobody refers to, and
            a server that died is made again.
        head: the cluster itself, if this process started it.
    """

    def __init__(
        self, scheduler: Any, servers: list[Any], sources: Any = None, head: Head | None = None
    ) -> None:
        self.scheduler, self.servers = scheduler, servers
        self._sources = sources
        self._head = head
        self.told: set[str] = set()
        """Of the roles' notices, what this process's log has; one set for all streams."""
        self._closers: list[Callable[[], None]] = []
        atexit.register(self.close)

    def at_close(self, closer: Callable[[], None]) -> None:
        """`closer` is called before the connection ends."""
        self._closers.append(closer)

    def roles(self, timeout_s: float = 30.0) -> list[RoleStatus]:
        """The scheduler's and every server's status; waits for one that is restarted."""
        return [
            Actors([actor], "role", "status", timeout_s)
            .ask(lambda actor: actor.status.remote(), "tell its status")
            .value
            for actor in (self.scheduler, *self.servers)
        ]

    def close(self) -> None:
        """Leaves the cluster, and ends it if this process started it. Idempotent."""
        import ray

        closers, self._closers = self._closers, []
        for closer in closers:
            closer()
        ray.shutdown()
        if self._head is not None:
            self._head.close()
        atexit.unregister(self.close)


def start(
    options: ClusterOptions, streams: Mapping[str, Stream], sources: Mapping[str, object]
) -> tuple[Cluster, str]:
    """Starts servers and scheduler, in a cluster of this machine's own unless there is an address.

    Args:
        sources: a PackSource by stream.

    Returns:
        the cluster, and what `join` needs on the other ranks.

    Raises:
        LoaderUnavailable: Ray does not start, cannot be joined, or has no room.
        CorpusError: the servers cannot open the sources.
    """
    environment = {} if options.address else _own_environment()
    os.environ.update(environment)
    shipped = pack(dict(sources))
    job = f"hdp-{secrets.token_hex(8)}"
    head, address = None, options.address
    if address is None:
        with _connecting("start Ray on this machine"):
            head = Head(options.servers + 1, options.timeout_s)
        address = head.address
    address = _connect(address, job)
    cluster = Cluster(*_make_actors(options, streams, shipped), head=head)
    where = {"address": address, "job": job, "servers": options.servers, "environment": environment}
    return cluster, json.dumps(where)


def join(where: str) -> Cluster:
    """Connects to what another rank's `start` made.

    Raises:
        LoaderUnavailable: Ray cannot be joined from here.
    """
    found = json.loads(where)
    os.environ.update(found["environment"])
    _connect(found["address"], found["job"])
    import ray

    servers = [ray.get_actor(f"server-{i}") for i in range(found["servers"])]
    return Cluster(ray.get_actor("scheduler"), servers)


def _own_environment() -> dict[str, str]:
    """Nobody else may join, nothing is reported, and full host memory (offload) kills no actor.

    Ray reads all but the last once, when it is imported.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
    }


def _connect(address: str, job: str) -> str:
    with _connecting(f"join the Ray cluster at {address}"):
        import ray

        context = ray.init(
            address=address, namespace=job, log_to_driver=False, logging_level=logging.ERROR
        )
        return str(context.address_info["gcs_address"])


@contextlib.contextmanager
def _connecting(what: str) -> Iterator[None]:
    """Ray takes SIGTERM for itself, which is Megatron's or the scheduler's of the whole job."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main else None
    try:
        yield
    except (RuntimeError, ConnectionError, TimeoutError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise LoaderUnavailable(
            f"--hdp-loader ray cannot {what} ({type(error).__name__}: {reason}): check "
            f"--hdp-ray-address (a cluster with a token needs RAY_AUTH_MODE=token in every rank's "
            f"environment), or use --hdp-loader local."
        ) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _make_actors(
    options: ClusterOptions, streams: Mapping[str, Stream], shipped: bytes
) -> tuple[Any, list[Any], Any]:
    import ray

    sources, folder = ray.put(shipped), os.getcwd()
    lasting = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": 0}
    servers = [
        ray.remote(Server)
        .options(
            name=f"server-{i}", max_concurrency=_CALLS, scheduling_strategy="SPREAD", **lasting
        )
        .remote(i, sources, folder, _READERS)
        for i in range(options.servers)
    ]
    scheduler = (
        ray.remote(Scheduler)
        .options(name="scheduler", **lasting)
        .remote(dict(streams), servers, options.ahead, options.timeout_s)
    )
    ready = [server.open.remote() for server in servers] + [scheduler.status.remote()]
    try:
        ray.get(ready, timeout=options.timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        free = ray.available_resources().get("CPU", 0)
        raise LoaderUnavailable(
            f"HDP waited {options.timeout_s:.0f} s for Ray to start {options.servers} servers and "
            f"a scheduler, a CPU each: the cluster has {free:g} CPUs left; free some, or lower "
            f"--hdp-loader-servers."
        ) from error
    except ray.exceptions.RayTaskError as error:
        raise cause_of(error) from error
    return scheduler, servers, sources

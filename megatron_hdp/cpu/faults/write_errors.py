# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A checkpoint that cannot be written ends without a word of what the system said."""

from __future__ import annotations

import errno
import functools
import logging
import os
import queue
import shutil
from typing import Any

from megatron_hdp.cpu.faults.fault import Fault


def _writer() -> Any:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    return filesystem_async.FileSystemWriterAsync


def _needed() -> bool:
    results: queue.Queue[Exception] = queue.Queue()
    nowhere = os.path.join(os.devnull, "shard")
    logger = logging.getLogger(_writer().__module__)
    logger.disabled = True
    try:
        _writer().write_preloaded_data_multithread([], False, 0, [(nowhere, "", ([], []))], results)
    finally:
        logger.disabled = False
    return os.strerror(errno.ENOTDIR) not in str(results.get())


def _handle() -> None:
    """Puts the system's own words into the error that Megatron passes on to the coordinator."""
    writer, failures = _writer(), list[str]()
    write_one, write_all = writer.write_preloaded_data, writer.write_preloaded_data_multithread

    @functools.wraps(write_one)
    def write_preloaded_data(
        transform_list: Any, local_proc_idx: int, write_bucket: Any, *args: Any, **kwargs: Any
    ) -> Any:
        output = write_one(transform_list, local_proc_idx, write_bucket, *args, **kwargs)
        if isinstance(output[1], Exception):
            failures.append(_sentence(str(write_bucket[0]), output[1]))
        return output

    @functools.wraps(write_all)
    def write_preloaded_data_multithread(
        transform_list: Any, use_msc: bool, rank: int, write_buckets: Any, global_results_queue: Any
    ) -> None:
        results: queue.Queue[Any] = queue.Queue()
        failures.clear()
        write_all(transform_list, use_msc, rank, write_buckets, results)
        result = results.get_nowait()
        if isinstance(result, Exception) and failures:
            result = RuntimeError(f"rank {rank} cannot write {'; '.join(failures)}")
        global_results_queue.put(result)

    writer.write_preloaded_data = staticmethod(write_preloaded_data)
    writer.write_preloaded_data_multithread = staticmethod(write_preloaded_data_multithread)


def _sentence(path: str, error: BaseException) -> str:
    """The path, the system's reason, which PyTorch's zip writer hides, and the free space."""
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, OSError):
        reason = reason.__cause__ or reason.__context__
    folder = os.path.dirname(path)
    free = f", {shutil.disk_usage(folder).free} bytes free there" if os.path.isdir(folder) else ""
    return f"{path}: {reason or error}{free}"


FAULT = Fault(
    symbol="megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync",
    seen="a full disk at a save ends in \"error: <class 'RuntimeError'>\"",
    where="any machine, GPUs too",
    needed=_needed,
    handle=_handle,
)

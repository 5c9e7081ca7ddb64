# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Sends a source to servers: arrays that map a file travel as the file's path."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from typing import Any

import numpy as np

from megatron_hdp.data.errors import CorpusError


def pack(value: object) -> bytes:
    """Pickles for another process that sees the same files.

    Raises:
        CorpusError: something in it cannot be pickled.
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, np.memmap) and isinstance(obj.base, mmap.mmap):
                place = os.path.abspath(str(obj.filename)), obj.dtype, obj.offset, obj.shape
                return _map, place
            return super().reducer_override(obj)

    stream = io.BytesIO()
    try:
        Pickler(stream, protocol=5).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"--hdp-loader ray cannot send the data source to its servers ({error}): use "
            f"--hdp-loader local."
        ) from error
    return stream.getvalue()


def _map(path: str, dtype: Any, offset: int, shape: tuple[int, ...]) -> Any:
    return np.memmap(path, dtype, mode="r", offset=offset, shape=shape)


def unpack(data: bytes, folder: str) -> Any:
    """What `pack` was given; relative paths in it count from `folder`, where it is there.

    Raises:
        CorpusError: a file is not to be seen from here.
    """
    if os.path.isdir(folder):
        os.chdir(folder)
    try:
        return pickle.loads(data)
    except (OSError, ValueError, AssertionError) as error:
        raise CorpusError(
            f"a loader server on {os.uname().nodename} cannot open the data ({error}): "
            f"--data-path and --data-cache-path must be on storage that every node mounts."
        ) from error

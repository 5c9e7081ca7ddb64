# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py on data whose every read takes long, as from remote storage.

The wait is where the reading is: in a rank with the local loader, in a server with Ray's. Lengths
come from the index, which is in memory either way. HDP_STORE_LATENCY_MS says how long.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.data.piece import Piece
from megatron_hdp.data.sources import PackSource, source_of

LATENCY = "HDP_STORE_LATENCY_MS"
SCRIPTS = Path(__file__).resolve().parents[1]


class SlowStore(PackSource):
    """A source of which every read takes `latency_s` longer."""

    def __init__(self, source: PackSource, latency_s: float) -> None:
        self._source, self._latency_s = source, latency_s
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def lengths(self, pack: int) -> NDArray[np.int64]:
        return self._source.lengths(pack)

    def document(self, pack: int, position: int) -> int:
        return self._source.document(pack, position)

    def read(self, pack: int, position: int, start: int, stop: int) -> Piece:
        time.sleep(self._latency_s)
        return self._source.read(pack, position, start, stop)


def main() -> None:
    """The script's own main; its datasets are read through the slow store."""
    sys.path.insert(0, str(SCRIPTS))
    import pretrain_gpt

    provider, latency_s = pretrain_gpt.datasets_provider, float(os.environ[LATENCY]) / 1000

    def provide(*args: Any, **kwargs: Any) -> Any:
        datasets = provider(*args, **kwargs)
        return tuple(d and SlowStore(source_of(d), latency_s) for d in datasets)

    provide.is_distributed = True  # type: ignore[attr-defined]
    pretrain_gpt.datasets_provider = provide
    pretrain_gpt.main()


if __name__ == "__main__":
    main()

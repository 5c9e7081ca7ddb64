# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Warnings of a process whose own log nobody reads, on their way to the log of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterable

_MOST = 100
"""Newer ones are dropped: a client that learns of 100 has enough."""
_MORE = f"more than {_MOST} warnings of the loader's processes: the others were dropped"


class Notices(logging.Handler):
    """Keeps this package's warnings of this process, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: dict[str, None] = {}
        logging.getLogger("megatron_hdp").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.add([record.getMessage()])

    def add(self, texts: Iterable[str]) -> None:
        """Takes over another process's."""
        for text in texts:
            if len(self._texts) < _MOST:
                self._texts[text] = None
            elif text not in self._texts:
                self._texts[_MORE] = None

    def all(self) -> list[str]:
        """In the order in which they came."""
        return list(self._texts)

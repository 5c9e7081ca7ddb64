# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The tokenising process: `python -m megatron_hdp.data.streams.worker`, driven by `ahead`.

Reads a pickled TokenStore and then shard numbers on stdin, and ends when stdin does. What goes
wrong is left to who needs the shard, and meets it again.
"""

from __future__ import annotations

import contextlib
import pickle
import sys

from megatron_hdp.cpu import faults


def main() -> None:
    """Tokenises each shard that nobody has tokenised or is at."""
    faults.handle_needed()  # of Megatron's wheel, which unpickling imports
    source = sys.stdin.buffer
    with contextlib.suppress(EOFError):
        store = pickle.load(source)
        while True:
            shard = pickle.load(source)
            with contextlib.suppress(OSError, ValueError):
                store.try_ahead(shard)


if __name__ == "__main__":
    main()

# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Arrow columns that hold JSON as strings (Hugging Face's `Json` feature, Arrow's `arrow.json`).

A chat whose contents are texts and lists of parts in turn is written like that; read as it stands,
its quotes and brackets would be trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Decode = Callable[[Any], Any]


def decoder_of(schema: Any) -> Decode | None:
    """What makes a row (a dict) of the schema whole; None: nothing in it is JSON."""
    return _fields({field.name: _decoder(field.type) for field in schema})


def _decoder(arrow_type: Any) -> Decode | None:
    import pyarrow.types

    if getattr(arrow_type, "extension_name", None) == "arrow.json":
        return json.loads
    if pyarrow.types.is_struct(arrow_type):
        return _fields({field.name: _decoder(field.type) for field in arrow_type})
    if pyarrow.types.is_list(arrow_type) or pyarrow.types.is_large_list(arrow_type):
        inner = _decoder(arrow_type.value_type)
        return inner and (lambda values: [_apply(inner, value) for value in values])
    return None


def _fields(decoders: dict[str, Decode | None]) -> Decode | None:
    known = {name: decode for name, decode in decoders.items() if decode}
    if not known:
        return None
    return lambda row: row | {name: _apply(decode, row[name]) for name, decode in known.items()}


def _apply(decode: Decode, value: Any) -> Any:
    return None if value is None else decode(value)

# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What every rank must be launched with alike; part of the digest that ranks compare."""

from __future__ import annotations

import argparse
import enum
import os
from dataclasses import fields

import torch
from megatron.core.package_info import __version__

from megatron_hdp.planning import PlannerConfig

_OF_ONE_RANK = ("rank", "local_rank", "save", "load", "pretrained_checkpoint")
_PLACES = ("_path", "_dir", "_file", "_trace")
_COMPARED = (bool, int, float, str, list, type(None), torch.dtype, enum.Enum)


def shared_settings(args: argparse.Namespace, config: PlannerConfig) -> dict[str, str]:
    """Every argument but ranks and places, by flag, and what the planner is configured with.

    Places in the file system may differ from host to host; a corpus is compared by its content.

    Args:
        args: Megatron's, after validation.
    """
    settings = {"megatron-core": __version__}
    for name, value in vars(args).items():
        place = name.endswith(_PLACES) or (isinstance(value, str) and os.sep in value)
        if isinstance(value, _COMPARED) and not place and name not in _OF_ONE_RANK:
            settings["--" + name.replace("_", "-")] = str(value)
    for field in fields(config):
        settings[f"planner {field.name}"] = str(getattr(config, field.name))
    return settings

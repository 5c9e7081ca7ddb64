# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What tests of arguments share."""

from __future__ import annotations

import argparse

import pytest

from tests.e2e.harness import BASE


@pytest.fixture(scope="module")
def parse(megatron_on_cpu):
    """Megatron's parser with the hdp group, over a sound launch line."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_hdp.runtime.options import add_hdp_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser = add_hdp_arguments(parser)
    return lambda argv: parser.parse_args([*BASE, *argv.split()])

# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a rule raises."""


class UnknownProgramError(Exception):
    """No rule is for this program."""


class WrongCommandError(Exception):
    """The command would fail."""

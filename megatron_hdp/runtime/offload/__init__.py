# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Selective activation offload. `engine` is the way in; it knows nothing of Megatron.

`transport` copies, `slabs` holds host memory, `saved` is what autograd keeps, `layer` decides and
prefetches, `selection` is the arithmetic; `block` binds it to Megatron's TransformerBlock.
"""

from megatron_hdp.runtime.offload.engine import ActivationOffload, MicroBatchOffload
from megatron_hdp.runtime.offload.saved import StaleTensorError

__all__ = ["ActivationOffload", "MicroBatchOffload", "StaleTensorError"]

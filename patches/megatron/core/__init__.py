# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0

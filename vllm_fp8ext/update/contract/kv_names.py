# SPDX-License-Identifier: Apache-2.0
"""What scales of the KV cache are called in checkpoints."""

import re

_SCALE = re.compile(r"\.(kv|[qkv])_scale$|\.q\.scale$|\.[kv]_cache\.scale$")


def is_kv_scale(name: str) -> bool:
    """Whether vLLM takes a tensor of this name for a scale of the KV cache (`weight_utils.maybe_remap_kv_scale_name`)."""
    return _SCALE.search(name) is not None

# SPDX-License-Identifier: Apache-2.0
"""Names of KV-cache scales in checkpoints."""

import re

_SCALE = re.compile(r"\.(kv|[qkv])_scale$|\.q\.scale$|\.[kv]_cache\.scale$")


def is_kv_scale(name: str) -> bool:
    """Tell whether vLLM takes a tensor of this name for a KV-cache scale (`weight_utils.maybe_remap_kv_scale_name`)."""
    return _SCALE.search(name) is not None

# SPDX-License-Identifier: Apache-2.0
"""Names of KV-cache scales in checkpoints."""

import re
from collections.abc import Collection

_SCALE = re.compile(r"\.(kv|[qkv])_scale$|\.q\.scale$|\.[kv]_cache\.scale$")


def is_kv_scale(name: str) -> bool:
    """Tell whether vLLM takes a tensor of this name for a KV-cache scale (`weight_utils.maybe_remap_kv_scale_name`)."""
    return _SCALE.search(name) is not None


_OF_LAYER = re.compile(r"^(?P<module>.+?)(?:\.(?:q|k|v|qkv)_proj)?(?:\.attn)?\.(?P<kinds>kv|[qkv])_scale$")


def layer_scale(name: str, layers: Collection[str]) -> tuple[str, str] | None:
    """Return the attention layer of a scale's name in a checkpoint, and its kinds: `q`, `k`, `v`, or `kv` for both.

    `layers`: those that are served, by vLLM's names. None if it belongs to none of them.
    """
    match = _OF_LAYER.match(name)
    if match is None:
        return None
    module = match["module"]
    layer = next((each for each in (f"{module}.attn", module) if each in layers), None)
    return None if layer is None else (layer, match["kinds"])

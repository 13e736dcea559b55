# SPDX-License-Identifier: Apache-2.0
"""Finds K and V: in memory, seen from an attention layer, and by request, seen from the scheduler.

Does with `Attention.kv_cache` what vLLM's backends do in `do_kv_cache_update`, and reads the tables of the scheduler and of
the KV cache manager.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.attention import Attention

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.layers.kv_cache_method import BACKENDS, FORMATS, LATENT_BACKENDS

FEATURE: str = "core"
WHY: str = "Rewrite cached K and V when their scales change: vLLM tells no plugin where they lie."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "know which blocks of K and V requests hold": (
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids(request_id)",
        "vllm.v1.core.sched.scheduler:Scheduler.kv_holding_waiting",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM lets a plugin rewrite cached K and V"


@dataclass(frozen=True)
class HeldBlocks:
    """Blocks of one KV cache group that requests hold.

    `layers`: names of the group's layers. `block_size`: tokens of a block as the KV cache manager counts them. `blocks`:
    sorted, each once, without the null block. The same number is another block in another group.
    """

    layers: tuple[str, ...]
    block_size: int
    blocks: tuple[int, ...]

    def rows(self, key: Tensor) -> Sequence[int]:
        """Rows of a cache of this group (`key_value_views`): where an attention kernel takes smaller blocks than the manager,
        several for each block."""
        each, rest = divmod(self.block_size, key.shape[1])
        if rest:
            raise ValueError(f"blocks of {self.block_size} tokens are no multiple of {key.shape[1]}")
        if each == 1:
            return self.blocks
        return [block * each + part for block in self.blocks for part in range(each)]


_PART = 32
"""Columns of a latent's row that are rewritten as one head."""


def require_known_cache(layer: Attention) -> None:
    """Raise `ConfigError` when a layer's backend lays out an E4M3 cache in unknown ways."""
    name = layer.attn_backend.get_name()
    if name not in BACKENDS:
        raise ConfigError(
            f"{layer.layer_name}: an FP8 KV cache whose scales change is known for the attention backends "
            f"{', '.join(BACKENDS)}, found {name} (choose one with --attention-backend)"
        )
    if layer.kv_cache_dtype not in FORMATS:
        raise ConfigError(
            f"{layer.layer_name}: expected a KV cache of dtype fp8 (E4M3), found {layer.kv_cache_dtype}"
        )
    if name not in LATENT_BACKENDS and layer.head_size != layer.head_size_v:
        raise ConfigError(
            f"{layer.layer_name}: expected heads of K and V of one size, found {layer.head_size} and {layer.head_size_v}"
        )


def key_value_views(layer: Attention) -> tuple[Tensor, Tensor]:
    """View K and V of a layer's cache, each `[blocks, block_size, heads, head_dim]` bytes.

    On CPUs elements are permuted within one head of one block (K is laid out for its instruction set), so that a place in
    `block_size` and `head_dim` says nothing there; blocks and heads are what they are.

    Raises:
        ConfigError: `require_known_cache`, or a cache of another shape than was read from the backend's source.
    """
    require_known_cache(layer)
    cache, width = layer.kv_cache, layer.head_size
    shape = tuple(cache.shape)
    if len(shape) != 4 or (shape[1], shape[3]) != (layer.num_kv_heads, 2 * width) or cache.itemsize != 1:
        raise ConfigError(
            f"{layer.layer_name}: expected a cache of bytes [blocks, {layer.num_kv_heads}, block_size, {2 * width}], found "
            f"{cache.dtype} {list(shape)}"
        )
    if layer.attn_backend.get_name() == "CPU_ATTN":
        blocks, heads, size, _ = shape
        key, value = cache.view(blocks, heads, 2 * size, width).chunk(2, dim=2)
        return key.transpose(1, 2), value.transpose(1, 2)
    key, value = cache.transpose(1, 2).split(width, dim=-1)
    return key, value


def latent_views(layer: Any) -> tuple[Tensor, Tensor]:
    """View the two halves of a latent's rows, which have the scale of K.

    Each is `[blocks, block_size, parts, 32]` bytes.

    Raises:
        ConfigError: `require_known_cache`, or a cache of another shape.
    """
    require_known_cache(layer)
    cache, width = layer.kv_cache, layer.head_size
    if cache.dim() != 3 or cache.shape[2] != width or width % (2 * _PART) or cache.itemsize != 1:
        raise ConfigError(
            f"{layer.layer_name}: expected a cache of bytes [blocks, block_size, {width}], a multiple of {2 * _PART}, found "
            f"{cache.dtype} {list(cache.shape)}"
        )
    first, second = cache.unflatten(2, (-1, _PART)).chunk(2, dim=2)
    return first, second


def held_blocks(core: Any) -> list[HeldBlocks]:
    """List the blocks of requests that run or hold K and V, by cache group."""
    scheduler = core.scheduler
    manager = scheduler.kv_cache_manager
    null = manager.block_pool.null_block.block_id
    groups = scheduler.kv_cache_config.kv_cache_groups
    held: list[set[int]] = [set() for _ in groups]
    for request in (*scheduler.running, *scheduler.kv_holding_waiting):
        for block_ids, blocks in zip(held, manager.get_block_ids(request.request_id), strict=True):
            block_ids.update(blocks)
    return [
        HeldBlocks(
            tuple(group.layer_names), group.kv_cache_spec.block_size, tuple(sorted(block_ids - {null}))
        )
        for group, block_ids in zip(groups, held, strict=True)
    ]

# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from vllm_fp8ext.compat.speed import decode_prefill_split


@pytest.fixture(scope="session")
def block_cache() -> Callable[..., KVCacheManager]:
    """Makes vLLM's own cache manager of so many blocks, for layers like these."""

    def made(specs: list[KVCacheSpec], count: int, **options: Any) -> KVCacheManager:
        groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        config = KVCacheConfig(num_blocks=count, kv_cache_tensors=[], kv_cache_groups=groups)
        size = specs[0].block_size
        return KVCacheManager(
            config, 1024, **{"scheduler_block_size": size, "hash_block_size": size, **options}
        )

    return made


@pytest.fixture
def mixed() -> FlashAttentionMetadata:
    """Two requests of one token, then one of four and, last in a batch that is not sorted, one of one."""
    metadata = FlashAttentionMetadata(
        num_actual_tokens=7,
        max_query_len=4,
        query_start_loc=torch.tensor([0, 1, 2, 6, 7], dtype=torch.int32),
        max_seq_len=40,
        seq_lens=torch.tensor([33, 1, 4, 40], dtype=torch.int32),
        block_table=torch.arange(8, dtype=torch.int32).view(4, 2),
        slot_mapping=torch.arange(7),
        scheduler_metadata=torch.zeros(5),
    )
    setattr(metadata, decode_prefill_split._SINGLE, decode_prefill_split._Single(2, torch.ones(3)))
    return metadata

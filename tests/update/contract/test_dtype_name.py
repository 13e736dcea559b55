# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors, as trainers with several ranks hold them, are refused by name."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from vllm_fp8ext.update.contract.dtype_name import dtype_name


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_a_part_of_a_tensor_as_fsdp2_holds_it() -> None:
    part = distribute_tensor(torch.ones(4, 3), DeviceMesh("cpu", [0]), [Shard(0)])
    with pytest.raises(ValueError, match=r"tensor a: .* found a DTensor: send its full_tensor\(\)"):
        dtype_name("a", part)
    assert dtype_name("a", part.full_tensor()) == "float32"


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
def test_a_part_of_a_tensor_as_fsdp1_holds_it() -> None:
    part = sharded_tensor.ones(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 4, 3)
    with pytest.raises(ValueError, match=r"tensor a: .* found a ShardedTensor: take FSDP's full state dict"):
        dtype_name("a", part)

# SPDX-License-Identifier: Apache-2.0
"""What vLLM's attention layers keep of their scales, without the layers."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm_fp8ext.kv_types import NAMES, HeadShare, Scales
from vllm_fp8ext.update.worker.kv_buffers import KvScaleBuffers

CPU = torch.device("cpu")


class Attention(torch.nn.Module):
    """Buffers, floats and host copies like those of vLLM's `Attention`; it keeps no host copy of Q's scale."""

    def __init__(self, *, heads: int = 0, served: float = 1.0) -> None:
        super().__init__()
        for name in NAMES:
            value = torch.full((heads,) if heads else (), served)
            self.register_buffer(f"_{name}_scale", value)
            setattr(self, f"_{name}_scale_float", served)
            if name != "q":
                setattr(self, f"_{name}_scale_cpu", torch.tensor(served))


def layers(*names: str, **how: Any) -> dict[str, Any]:
    return {name: Attention(**how) for name in names}


def of_ranks(world_size: int, total: int, *names: str) -> list[tuple[dict[str, Any], KvScaleBuffers]]:
    """The layers and scales of each rank, with a scale for each of `total` KV heads."""
    collected = []
    for rank in range(world_size):
        shares = {name: HeadShare.of(rank, world_size, total) for name in names}
        mine = layers(*names, heads=HeadShare.of(rank, world_size, total).count)
        collected.append((mine, KvScaleBuffers(mine, shares, device=CPU)))
    return collected


def scales(**by_layer: float | list[float]) -> Scales:
    """The same for Q, K and V."""
    return {
        name: {kind: value if isinstance(value, list) else [value] for kind in NAMES}
        for name, value in by_layer.items()
    }


def copies(layer: Any, kind: str) -> SimpleNamespace:
    """Every copy that vLLM keeps of one scale."""
    return SimpleNamespace(
        device=getattr(layer, f"_{kind}_scale").tolist(),
        number=getattr(layer, f"_{kind}_scale_float"),
        host=float(getattr(layer, f"_{kind}_scale_cpu")) if kind != "q" else None,
    )

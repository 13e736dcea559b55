# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors as a trainer holds them whose experts are fused."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from vllm_fp8ext.serve.safetensors_file import ranges_of
from vllm_fp8ext.update.contract.fused import fused_experts
from vllm_fp8ext.update.transports.wire import stored


def stored_fused(checkpoint: Path, device: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield what `wire.stored` yields, with the experts of a layer as one or two tensors."""
    whole = fused_experts({part.name: tuple(part.shape) for part in ranges_of(checkpoint)})
    places = {part: (name, number) for name, of in whole.items() for number, part in enumerate(of.parts)}
    begun: dict[str, Tensor] = {}
    missing = {name: len(of.parts) for name, of in whole.items()}
    for name, tensor in stored(checkpoint, device):
        if name not in places:
            yield name, tensor
            continue
        into, number = places[name]
        if into not in begun:
            begun[into] = tensor.new_empty(whole[into].shape)
        begun[into].view(-1, *tensor.shape)[number] = tensor
        missing[into] -= 1
        if not missing[into]:
            yield into, begun.pop(into)

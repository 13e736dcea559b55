# SPDX-License-Identifier: Apache-2.0
"""The KV scales of one rank's attention layers: those served, in every copy of vLLM's, and those of the shadow.

Kernels read device buffers whose addresses CUDA graphs remember, CPU attention reads Python floats: both change together,
when the weights are swapped.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.kernels.attention.rescale_kv import ratio_of
from vllm_fp8ext.kv_types import NAMES, HeadShare, RankScales, Scales, write_host_copies

_ALIGNED = 4
"""Numbers in 16 bytes: compiled graphs copy inputs that begin elsewhere."""


class KvScaleBuffers:
    """Holds served scales and those of the shadow.

    `layers`: vLLM's attention layers by name, whose scale buffers become views of one tensor. `shares`: by layer, where each
    KV head has its own scale; empty where each layer has one.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        shares: Mapping[str, HeadShare],
        *,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._shares = shares
        self._per_head = bool(shares)
        self.broken = False
        """True after a swap that failed and could not be undone."""
        self._slices: dict[tuple[str, str], slice] = {}
        end = 0
        for name in layers:
            for kind in NAMES:
                width = shares[name].count if shares else 1
                self._slices[name, kind] = slice(end, end + width)
                end += -(-width // _ALIGNED) * _ALIGNED
        self._live = torch.ones(end, dtype=torch.float32, device=device)
        self._shadow = torch.ones(end, dtype=torch.float32, device=device)
        self._mirrors = [[1.0] * end, [1.0] * end]
        """Values on the device, of served scales and of the shadow's."""
        for (name, kind), part in self._slices.items():
            layer = layers[name]
            self._live[part] = getattr(layer, f"_{kind}_scale").detach().float().reshape(-1)
            view = self._live[part] if shares else self._live[part.start]
            setattr(layer, f"_{kind}_scale", view)
        self._mirrors[0] = self._live.tolist()
        self._mirrors[1] = list(self._mirrors[0])
        self._shadow.copy_(self._live)
        self._publish()

    def __contains__(self, layer: str) -> bool:
        """Tell whether a layer has scales: some may cache in 16 bits."""
        return layer in self._layers

    def served(self) -> RankScales:
        """Return this rank's scales, as the device has them."""
        scales: RankScales = {}
        values = self._live.tolist()
        for (name, kind), part in self._slices.items():
            scales.setdefault(name, {})[kind] = self.spread(name, values[part])
        return scales

    def spread(self, layer: str, values: list[float]) -> list[float | None]:
        """Return values of this rank's heads at their places among those of all ranks."""
        if not self._per_head:
            return [*values]
        share = self._shares[layer]
        all_heads: list[float | None] = [None] * share.total
        all_heads[share.first : share.first + share.count] = values
        return all_heads

    def stage(self, scales: Scales) -> None:
        """Give the shadow these scales, of all ranks' heads."""
        mirror = list(self._mirrors[1])
        for (name, kind), part in self._slices.items():
            mirror[part] = self._own_heads(name, scales[name][kind])
        self._shadow.copy_(torch.tensor(mirror))
        self._mirrors[1] = self._shadow.tolist()  # as fp32 has them

    def _own_heads(self, layer: str, values: list[float]) -> list[float]:
        if not self._per_head:
            return values
        share = self._shares[layer]
        return values[share.first : share.first + share.count]

    def staged(self, layer: str, kind: str) -> Tensor:
        """Return the shadow's scales of a layer on this rank: fp32, one or `[G]`."""
        return self._shadow[self._slices[layer, kind]]

    def ratios(self) -> dict[str, dict[str, list[float]]]:
        """Return factors by which cached K and V keep their meaning after a swap.

        By layer; none where nothing changed.

        Raises:
            ValueError: a ratio is beyond fp32.
        """
        parts = {key: part for key, part in self._slices.items() if key[1] != "q"}
        now, before = (
            torch.tensor([value for part in parts.values() for value in mirror[part]])
            for mirror in self._mirrors
        )
        factors = iter(ratio_of(before, now, len(now)).tolist())
        by_layer: dict[str, dict[str, list[float]]] = {}
        for (name, kind), part in parts.items():
            by_layer.setdefault(name, {})[kind] = [next(factors) for _ in self._mirrors[0][part]]
        return {
            name: ratios
            for name, ratios in by_layer.items()
            if any(ratio != 1.0 for values in ratios.values() for ratio in values)
        }

    def swap(self) -> None:
        """Swap served and staged scales, in every copy.

        Undone when it fails half-way; `broken` when that fails too.
        """
        self.broken = True
        self._mirrors.reverse()
        try:
            self._write()
        except BaseException:
            self._mirrors.reverse()
            self._write()
            self.broken = False
            raise
        self.broken = False

    def _write(self) -> None:
        """Write the mirrors' values everywhere."""
        self.restore()
        self._publish()

    def restore(self) -> None:
        """Put scales back into the device's memory, which lost its contents."""
        for buffer, mirror in zip((self._live, self._shadow), self._mirrors, strict=True):
            # not blocking: the swap of weights may be queued before it
            buffer.copy_(torch.tensor(mirror), non_blocking=True)

    def fingerprint(self, *, shadow: bool) -> int:
        """Return a checksum of what the device holds; -1 when vLLM's host copies differ from it."""
        values = self._shadow if shadow else self._live
        if not shadow and not self._agree():
            return -1
        return zlib.crc32(values.cpu().numpy().tobytes())

    def _publish(self) -> None:
        """Write what is served into the copies in host memory.

        Kernels that take one number take the largest.
        """
        for (name, kind), part in self._slices.items():
            write_host_copies(self._layers[name], kind, max(self._mirrors[0][part]))

    def _agree(self) -> bool:
        """Tell whether vLLM's host copies are what is served."""
        for (name, kind), part in self._slices.items():
            layer, value = self._layers[name], max(self._mirrors[0][part])
            copy = getattr(layer, f"_{kind}_scale_cpu", None)
            if getattr(layer, f"_{kind}_scale_float") != value or (copy is not None and float(copy) != value):
                return False
        return True

# SPDX-License-Identifier: Apache-2.0
"""The scales of one rank's attention layers: those served, in every copy that vLLM keeps of them, and those of the twin.

Kernels read device buffers whose addresses CUDA graphs remember, CPU attention reads Python floats: both change together, in
`exchange`, beside the exchange of the weights.
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


class KvScales:
    """`layers`: vLLM's attention layers by name, whose scale buffers become views of one tensor. `shares`: by layer, where
    each KV head has its own scale; empty where each layer has one."""

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
        """Whether an exchange failed and could not be undone."""
        self._places: dict[tuple[str, str], slice] = {}
        end = 0
        for name in layers:
            for kind in NAMES:
                width = shares[name].count if shares else 1
                self._places[name, kind] = slice(end, end + width)
                end += -(-width // _ALIGNED) * _ALIGNED
        self._live = torch.ones(end, dtype=torch.float32, device=device)
        self._twin = torch.ones(end, dtype=torch.float32, device=device)
        self._mirrors = [[1.0] * end, [1.0] * end]
        """Served, and of the twin: what the device holds."""
        for (name, kind), place in self._places.items():
            layer = layers[name]
            found = getattr(layer, f"_{kind}_scale").detach().float().reshape(-1)
            self._live[place] = found
            view = self._live[place] if shares else self._live[place.start]
            setattr(layer, f"_{kind}_scale", view)
        self._mirrors[0] = self._live.tolist()
        self._mirrors[1] = list(self._mirrors[0])
        self._twin.copy_(self._live)
        self._publish()

    def __contains__(self, layer: str) -> bool:
        """Whether a layer has scales: some may cache in 16 bits."""
        return layer in self._layers

    def served(self) -> RankScales:
        """This rank's scales, as the device has them."""
        found: RankScales = {}
        values = self._live.tolist()
        for (name, kind), place in self._places.items():
            found.setdefault(name, {})[kind] = self.spread(name, values[place])
        return found

    def spread(self, layer: str, values: list[float]) -> list[float | None]:
        """Values of this rank's heads at their places among those of all ranks."""
        if not self._per_head:
            return [*values]
        share = self._shares[layer]
        all_of_them: list[float | None] = [None] * share.total
        all_of_them[share.first : share.first + share.count] = values
        return all_of_them

    def stage(self, scales: Scales) -> None:
        """Give the twin these scales, of all ranks' heads."""
        mirror = list(self._mirrors[1])
        for (name, kind), place in self._places.items():
            mirror[place] = self._mine(name, scales[name][kind])
        self._twin.copy_(torch.tensor(mirror))
        self._mirrors[1] = self._twin.tolist()  # as fp32 has them

    def _mine(self, layer: str, values: list[float]) -> list[float]:
        if not self._per_head:
            return values
        share = self._shares[layer]
        return values[share.first : share.first + share.count]

    def staged(self, layer: str, kind: str) -> Tensor:
        """The twin's scales of a layer on this rank: fp32, one or `[G]`."""
        return self._twin[self._places[layer, kind]]

    def ratios(self) -> dict[str, dict[str, list[float]]]:
        """After `exchange`: by layer, by what numbers codes of K and V in the cache are multiplied so that they mean the
        same; none where nothing changed.

        Raises:
            ValueError: a ratio is beyond fp32.
        """
        places = {key: place for key, place in self._places.items() if key[1] != "q"}
        now, before = (
            torch.tensor([value for place in places.values() for value in mirror[place]])
            for mirror in self._mirrors
        )
        left = iter(ratio_of(before, now, len(now)).tolist())
        found: dict[str, dict[str, list[float]]] = {}
        for (name, kind), place in places.items():
            found.setdefault(name, {})[kind] = [next(left) for _ in self._mirrors[0][place]]
        return {
            name: ratios
            for name, ratios in found.items()
            if any(ratio != 1.0 for values in ratios.values() for ratio in values)
        }

    def exchange(self) -> None:
        """Swap served and staged scales, in every copy. Undone when it fails half-way; `broken` when that fails too."""
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
        """Make everything what the mirrors say."""
        self.refresh()
        self._publish()

    def refresh(self) -> None:
        """The device's memory lost its contents: put them back."""
        for place, mirror in zip((self._live, self._twin), self._mirrors, strict=True):
            place.copy_(
                torch.tensor(mirror), non_blocking=True
            )  # the exchange of weights may be queued before it

    def fingerprint(self, *, twin: bool) -> int:
        """Of what the device holds; -1 when vLLM's host copies say something else."""
        values = self._twin if twin else self._live
        if not twin and not self._agree():
            return -1
        return zlib.crc32(values.cpu().numpy().tobytes())

    def _publish(self) -> None:
        """Write what is served into the copies in host memory. Kernels that take one number take the largest."""
        for (name, kind), place in self._places.items():
            write_host_copies(self._layers[name], kind, max(self._mirrors[0][place]))

    def _agree(self) -> bool:
        """Whether vLLM's host copies are what is served."""
        for (name, kind), place in self._places.items():
            layer, value = self._layers[name], max(self._mirrors[0][place])
            copy = getattr(layer, f"_{kind}_scale_cpu", None)
            if getattr(layer, f"_{kind}_scale_float") != value or (copy is not None and float(copy) != value):
                return False
        return True

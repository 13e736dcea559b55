# SPDX-License-Identifier: Apache-2.0
"""Chooses kernels for the experts of a layer, and tile configs for small M."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

FUSED_KERNEL, TRITON_KERNEL = "fused", "triton"
"""Names of the kernels for small M and beyond; a third one takes what is more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertTileConfig:
    """Tile sizes of the two GEMMs of `expert_mlp`."""

    tokens: int = 16
    """Tokens of one expert that a program takes: 16, 32 or 64."""
    rows: int = 64
    """Rows of gate, and as many of up, of a program: 64, or 128, which is a whole block that the program quantizes."""
    down_rows: int = 64
    """Rows of down of a program: 64 or 128."""
    stages: int = 4
    """Blocks of 128 columns in flight."""
    warps: int = 4
    alone: bool = False
    """Each slot makes a block of its own, and no expert's slots are listed: for fewer slots than experts."""
    ahead: int = 0
    """Blocks of 128 columns of weights to prefetch before waiting for activations.

    Programs that run at once should together ask for less than the L2 cache holds."""

    @property
    def name(self) -> str:
        """In results."""
        marks = f"{'a' if self.alone else ''}{f'p{self.ahead}' if self.ahead else ''}"
        return f"{self.tokens}x{self.rows}/{self.down_rows}s{self.stages}w{self.warps}{marks}"


TILE_CONFIGS: tuple[tuple[float, ExpertTileConfig], ...] = (
    (0.5, ExpertTileConfig(down_rows=128, stages=3, alone=True)),
    (8.0, ExpertTileConfig(down_rows=128, stages=3)),
    (32.0, ExpertTileConfig(tokens=32, rows=128, down_rows=128, stages=3, ahead=2)),
    (float("inf"), ExpertTileConfig(tokens=64, rows=128, down_rows=128, stages=3, warps=8)),
)
"""Tile configs by the most slots for each expert of the model.

Up to 32 slots they are within 4 % of the fastest that `fp8ext bench kernels --only
experts` finds for each number of tokens. The last one is for users who want `fused` beyond."""
FUSED, TRITON = 16.0, 48.0
"""Most slots for each expert that go to `fused`, and to `triton` beyond; `deep_gemm` takes the others."""


class ExpertChoice(NamedTuple):
    """A kernel, and its tile config if it is `fused`."""

    kernel: str
    config: ExpertTileConfig | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertRoute:
    """The kernels of one layer, by number of tokens."""

    experts: int
    """Experts of the whole model: tokens are shared out among these."""
    chosen: int
    """Experts of a token."""
    gemm: str
    """For more tokens than the others take."""
    fused_tokens: int
    """Most tokens that go to `fused`."""
    triton_tokens: int
    """Most tokens that go to `triton`, beyond these."""

    def choose(self, tokens: int) -> ExpertChoice:
        """The kernel for so many tokens."""
        if tokens <= self.fused_tokens or self.gemm == FUSED_KERNEL:
            load = tokens * self.chosen / self.experts
            return ExpertChoice(FUSED_KERNEL, next(config for most, config in TILE_CONFIGS if load <= most))
        return ExpertChoice(TRITON_KERNEL if tokens <= self.triton_tokens else self.gemm, None)

    def boundaries(self, most: int) -> list[int]:
        """Up to `most` tokens, the largest number of each kernel and tile config."""
        ends = {self.fused_tokens, self.triton_tokens, most}
        if self.gemm == FUSED_KERNEL or self.fused_tokens:
            ends |= {int(load * self.experts / self.chosen) for load, _ in TILE_CONFIGS[:-1]}
        return sorted(end for end in ends if 0 < end <= most)


def expert_route(
    experts: int,
    chosen: int,
    usable: Sequence[str],
    *,
    batch_invariant: bool = False,
    fused_tokens: int | None = None,
    triton_tokens: int | None = None,
    gemm: str | None = None,
) -> ExpertRoute:
    """Choose the kernels of a layer of experts.

    Each token goes to `chosen` of all `experts`. `usable`: kernels that take it here, the fastest for large M first.
    `batch_invariant`: the same kernel whatever the number of tokens. A kernel or a number of tokens that the user chose
    (`fused_tokens`, `triton_tokens`, `gemm`) is kept.

    Raises:
        ValueError: a kernel that the user chose does not take the layer here, or nothing does.
    """
    chosen_kernels = [(FUSED_KERNEL, fused_tokens), (TRITON_KERNEL, triton_tokens), (gemm, gemm)]
    for kernel, setting in chosen_kernels:
        if setting and kernel not in usable:
            able = ", ".join(usable) or "none"
            raise ValueError(f"{kernel}: does not take these experts here; those that do: {able}")
    order = [name for name in usable if not (batch_invariant and name == FUSED_KERNEL)]
    if not order:
        raise ValueError("no FP8 kernel takes these experts here")
    last = gemm or order[0]

    def most(load: float, kernel: str, setting: int | None) -> int:
        if setting is not None:
            return setting
        if batch_invariant or kernel not in usable or last == kernel:
            return 0
        return int(load * experts / chosen)

    return ExpertRoute(
        experts=experts,
        chosen=chosen,
        gemm=last,
        fused_tokens=most(FUSED, FUSED_KERNEL, fused_tokens),
        triton_tokens=most(TRITON, TRITON_KERNEL, triton_tokens),
    )

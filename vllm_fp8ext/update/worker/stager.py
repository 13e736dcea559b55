# SPDX-License-Identifier: Apache-2.0
"""Stages checkpoint tensors into a rank's second copy: blocks are quantized straight into their place, all else is copied.

What becomes of a tensor is decided once, as steps (`staging_steps`). Tensors that lie together on the rank's GPU are staged
by batched launches (`stage_batch`); rows that come by themselves, and what no batch takes, step by step (`stage`).

A block that spans two checkpoint tensors (a fused layer whose parts are not multiples of 128 rows), or parts of one, waits in
a strip of at most 128 rows until all of its rows are there. So tensors may come in any order, each may come again, and the
result depends on their contents alone. Needs no vLLM, no forward context and no collective: it may run on any thread.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import UNIT
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice, piece_within
from vllm_fp8ext.update.contract.tensor_slices import parsed_slice
from vllm_fp8ext.update.transports.memory import ResidentTensors
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.rate_limiter import RateLimiter
from vllm_fp8ext.update.worker.staging_steps import CopyValues, StagingInput, Step, steps_of
from vllm_fp8ext.update.worker.verdicts import COPIED_CODES, COPIED_VALUES, QUANTIZED, VerdictTable

if TYPE_CHECKING:
    from vllm_fp8ext.update.worker.staging_plan import StagingPlans


class Stager:
    """Stages tensors by checkpoint name into one rank's parameters.

    `quantized`, `plain`: by the targets of pieces, the parameters. `tied`: by the name of an output layer that goes where the
    embedding goes, the embedding's. `stacked`: shapes of fused experts, which may come with their last two dimensions in the
    other order.
    """

    def __init__(
        self,
        pieces: Mapping[str, tuple[ShardSlice, ...]],
        quantized: Mapping[str, QuantizedTarget],
        plain: Mapping[str, Tensor],
        tied: Mapping[str, str] | None = None,
        stacked: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.tied = tied or {}
        self.pieces = {**pieces, **{head: pieces[embedding] for head, embedding in self.tied.items()}}
        self.quantized = quantized
        self.plain = plain
        self._stacked = stacked or {}
        self._of_slices = lru_cache(maxsize=1 << 16)(self._pieces_of_slice)

    def serves(self, name: str) -> bool:
        """Tell whether this rank serves any of a tensor, or of a slice of one."""
        return bool(self.pieces_of(name))

    def pieces_of(self, name: str) -> tuple[ShardSlice, ...]:
        """Return the pieces of what comes under a name: of a tensor, or of a slice, in which their `source` lies then."""
        known = self.pieces.get(name)
        return self._of_slices(name) if known is None else known

    def _pieces_of_slice(self, name: str) -> tuple[ShardSlice, ...]:
        part = parsed_slice(name)
        if part is None:
            return ()
        pieces = (piece_within(piece, part.box) for piece in self.pieces.get(part.tensor, ()))
        return tuple(piece for piece in pieces if piece is not None)

    def reset(self) -> None:
        """Forget all partly filled blocks: a new update begins."""
        for target in self.quantized.values():
            target.reset()

    def stage(self, rows: StagingInput, table: VerdictTable) -> None:
        """Queue the staging of rows of one tensor. All of its rows must come, in order.

        This rank may have no part of it. What is found wrong is written all the same: the tensor counts as not staged
        until it comes again.
        """
        table.add_tensor(rows.name)
        if self._is_turned(rows.name, rows.values.shape):
            rows = replace(rows, values=rows.values.transpose(1, 2))
        for step in self._steps(rows.name, (rows.first, rows.first + rows.count), rows.values.dtype):
            step.run(rows, table)

    def compare(self, rows: StagingInput, table: VerdictTable) -> None:
        """Queue the comparison of rows of one tensor with what is in their place. Nothing is written."""
        table.add_tensor(rows.name)
        for step in self._steps(rows.name, (rows.first, rows.first + rows.count), rows.values.dtype):
            assert isinstance(step, CopyValues)
            step.compare(rows, table)

    def stage_batch(
        self, placed: ResidentTensors, exclude: Collection[str], limiter: RateLimiter, table: VerdictTable
    ) -> ResidentTensors:
        """Queue the staging of tensors on the rank's GPU, in a few launches.

        Returns those of `exclude`, by name, and those that have to come as rows: with a strip to fill, values of another
        dtype than the served one, an odd address.
        """
        starts = torch.tensor([stored.start for stored in placed.tensors], dtype=torch.int64)
        addresses, tensors = placed.memory.addresses(starts), placed.tensors
        batched = addresses % UNIT == 0
        if exclude:
            batched &= torch.tensor([stored.spec.name not in exclude for stored in tensors])
        if not batched.all():
            addresses = addresses[batched]
            tensors = [stored for stored, good in zip(tensors, batched.tolist(), strict=True) if good]
        plan = self._plans.plan_of(tensors)
        wait = None if limiter.unlimited else limiter.wait
        table.add_batch(plan.names, [op.queue(addresses, wait) for op in plan.ops])
        rest = placed.tensors
        staged = frozenset(plan.names)
        if len(staged) == len(rest):
            rest = []
        elif staged:
            rest = [stored for stored in rest if stored.spec.name not in staged]
        return replace(placed, tensors=rest)

    def prepare_batches(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        """Make the launches of `stage_batch` for tensors that may come together in any order; and read a table of their
        verdicts, which takes longer the first time."""
        self._plans.prepare(specs)
        table = VerdictTable()
        for columns in (QUANTIZED, COPIED_CODES, COPIED_VALUES):
            sums = torch.zeros(1, len(columns), dtype=torch.float64, device=device)
            table.add_batch([""], [(columns, torch.zeros(1, dtype=torch.int64), sums)])
        table.verdicts()

    def warm_up(self) -> None:
        """Run what `stage` runs, on memory as large as the smallest target."""
        table = VerdictTable()
        for values in list(self.plain.values())[:1]:
            table.add_values("", torch.zeros_like(values))
        if self.quantized:
            like = min(self.quantized.values(), key=lambda target: target.codes.numel())
            codes, scales = torch.empty_like(like.codes), torch.empty_like(like.scales)
            values = torch.zeros(codes.shape, dtype=like.dtype, device=codes.device)
            target = QuantizedTarget(codes, scales, like.dtype, like.scale_format)
            table.add_blocks("", target.quantize(0, values))
        table.verdicts()

    @cached_property
    def _plans(self) -> "StagingPlans":
        from vllm_fp8ext.update.worker.staging_plan import StagingPlans

        return StagingPlans(self._all_steps)

    def _is_turned(self, name: str, shape: tuple[int, ...]) -> bool:
        """Tell whether fused experts come in the other layout."""
        return name in self._stacked and tuple(shape[1:]) != self._stacked[name][1:]

    def _all_steps(self, spec: TensorSpec) -> Iterable[Step]:
        if self._is_turned(spec.name, spec.shape):
            return ()  # it has to come as rows
        rows = spec.shape[0] if spec.shape else 1
        return self._steps(spec.name, (0, rows), spec.torch_dtype)

    def _steps(self, name: str, rows: tuple[int, int], dtype: torch.dtype) -> Iterator[Step]:
        for piece in self.pieces_of(name):
            yield from steps_of(piece, self.quantized, self.plain, rows, dtype)

# SPDX-License-Identifier: Apache-2.0
"""Stages the tensors of one chunk, and collects what is wrong with them."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, SCALES, scale_name
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.memory import ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.worker.checksums import Checksums
from vllm_fp8ext.update.worker.rate_limiter import RateLimiter
from vllm_fp8ext.update.worker.stager import Stager
from vllm_fp8ext.update.worker.staging_steps import StagingInput
from vllm_fp8ext.update.worker.tied_tensors import TiedTensors
from vllm_fp8ext.update.worker.verdicts import VerdictTable


class ChunkIntake:
    """Stages one chunk's tensors: together, or row by row.

    `tied`: has begun the chunk. `compared`: tensors that come as rows because of it.
    """

    def __init__(
        self,
        stager: Stager,
        checksums: Checksums,
        tensors: Sequence[StoredTensor],
        device: torch.device,
        tied: TiedTensors,
        compared: frozenset[str],
    ) -> None:
        self.staged = 0
        """Tensors that are staged."""
        self.problems: list[dict[str, Any]] = []
        """Wrong checksums."""
        self.table = VerdictTable()
        self._stager = stager
        self._checksums = checksums
        self._tensors = tensors
        self._device = device
        self._tied = tied
        self._unbatched = compared.union(checksums.parts)
        self._codes = {stored.spec.name for stored in tensors if stored.spec.dtype == CODES_DTYPE}
        self._scale_names = set(map(scale_name, self._codes))
        self._scales: dict[str, Tensor] = {}

    @property
    def as_rows(self) -> set[str]:
        """Names of tensors that are read as rows: hashed on the host, compared, codes, and their scales."""
        return {*self._unbatched, *self._codes, *self._scale_names}

    def ordered(self) -> list[StoredTensor]:
        """List the tensors that this rank stages or hashes, in reading order.

        It is the order in which they lie; but codes come after all scales, which are small, and nothing that comes as rows is
        between tensors that are staged together.
        """
        ordered = [stored for stored in self._tensors if self._reads(stored.spec.name)]
        ordered.sort(key=attrgetter("start"))
        as_rows, first = self.as_rows, self._scale_names
        if as_rows:
            ordered.sort(key=lambda stored: (stored.spec.name not in first, stored.spec.name in as_rows))
        return ordered

    def _reads(self, name: str) -> bool:
        """Tell whether this rank stages or hashes a tensor, or one whose scales these are."""
        weight = name.removesuffix(SCALES)
        hashed = self._checksums.parts
        return self._stager.serves(weight) or weight in hashed or self._stager.serves(name) or name in hashed

    def stage(self, part: ResidentTensors | TensorRows, limiter: RateLimiter) -> Iterable[TensorRows]:
        """Queue the staging of tensors that lie together; return what has to be staged as rows."""
        if isinstance(part, TensorRows):
            return (part,)
        rest = self._stager.stage_batch(part, self._unbatched, limiter, self.table)
        self.staged += len(part.tensors) - len(rest.tensors)
        return rest

    def stage_rows(self, rows: TensorRows) -> None:
        """Queue the staging of the next rows."""
        spec, first = rows.stored.spec, rows.first
        name = spec.name
        problem = self._checksums.problem(rows)
        if problem:
            self.problems.append(problem)
        self.staged += rows.last
        if name in self._scale_names:
            if name not in self._scales:
                self._scales[name] = torch.empty(spec.shape, dtype=torch.float32, device=self._device)
            self._scales[name][first : first + len(rows.values)].copy_(rows.values, non_blocking=True)
            return
        scales = self._scales[scale_name(name)] if name in self._codes else None
        values = StagingInput(name, rows.values, first, scales)
        if self._tied.compares(name):
            self._stager.compare(values, self.table)
        else:
            self._stager.stage(values, self.table)

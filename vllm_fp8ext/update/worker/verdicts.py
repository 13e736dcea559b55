# SPDX-License-Identifier: Apache-2.0
"""The verdict table: what the device measures while tensors are staged, read once when all of them are.

Staging only queues work. Each step of it adds what it measures (squared errors, values that are not finite, scales that can't
be served) to the rows of its tensors, and nobody waits before `verdicts`.
"""

from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import NonFiniteError
from vllm_fp8ext.kernels.quantize import quantize_weight


class Column(IntEnum):
    """Columns of the verdict table. The last three count what makes a tensor unfit."""

    ERROR = 0
    """Squared quantization error."""
    NORM = 1
    """Squared norm of the values that were quantized."""
    NOT_FINITE = 2
    """Parts with NaN or infinity in values, codes or scales."""
    WRONG_SCALES = 3
    """Parts with scales that are not positive, or no powers of two where all are."""
    DIFFERS = 4
    """Parts that differ from the tensor whose place they share."""


Columns: TypeAlias = tuple[Column, ...]
QUANTIZED: Columns = (Column.ERROR, Column.NORM, Column.NOT_FINITE)
"""Columns that quantizing a part measures."""
COPIED_CODES: Columns = (Column.NOT_FINITE, Column.WRONG_SCALES)
"""Columns that copying codes and scales measures."""
COPIED_VALUES: Columns = (Column.NOT_FINITE,)
"""Columns that copying values measures."""
COMPARED: Columns = (Column.DIFFERS,)
"""Columns that comparing a part measures."""


class ScaleError(ValueError):
    """Block scales that can't be served."""


class TiedError(ValueError):
    """An output layer and the embedding that is served as it are not equal."""


Verdict: TypeAlias = tuple[float, float] | NonFiniteError | ScaleError | TiedError
"""Squared error and squared norm of a tensor, or what is wrong with it."""


class VerdictTable:
    """One row for each staged tensor, in the order in which they came."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        self._sums: dict[Columns, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._blocks: list[tuple[int, Tensor]] = []
        self._values: list[tuple[int, Tensor]] = []
        self._flags: dict[Columns, list[tuple[int, Tensor]]] = defaultdict(list)

    def add_tensor(self, name: str) -> int:
        """Return the row of a tensor, a new one when it is new."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._names)
            self._names.append(name)
        return row

    def add_blocks(self, name: str, sums: Tensor) -> None:
        """Add what `quantize_weight.queue` returned for a part of a tensor."""
        self._blocks.append((self.add_tensor(name), sums))

    def add_values(self, name: str, values: Tensor) -> None:
        """Have copied values of a tensor checked for NaN and infinity, in the end."""
        if values.numel():
            self._values.append((self.add_tensor(name), values))

    def add_flags(self, name: str, columns: Columns, flags: Tensor) -> None:
        """Count what is true: bool `[columns]`."""
        self._flags[columns].append((self.add_tensor(name), flags))

    def add_batch(self, names: Sequence[str], measured: Sequence[tuple[Columns, Tensor, Tensor]]) -> None:
        """Add tensors that were staged together: what launches measured, each with its columns, whose parts they are (int64
        `[parts]`, indices of `names`, on the host) and sums (fp64 `[parts, columns]`)."""
        first = len(self._names)
        self._names += names
        for columns, owners, sums in measured:
            self._sums[columns].append((owners + first, sums))

    def verdicts(self) -> dict[str, Verdict]:
        """Wait until everything is staged, once, and return what became of each tensor."""
        table = torch.zeros(len(self._names), len(Column), dtype=torch.float64)
        for columns, parts in self._reduced().items():
            rows = torch.cat([rows for rows, _ in parts])
            sums = torch.cat([sums for _, sums in parts]).cpu().nan_to_num(0.0, 0.0, 0.0)
            for index, column in enumerate(columns):
                table[:, column].index_add_(0, rows, sums[:, index])
        sums = zip(*table[:, : Column.NOT_FINITE].T.tolist(), strict=True)
        verdicts: dict[str, Verdict] = dict(zip(self._names, sums, strict=True))
        for row in table[:, Column.NOT_FINITE :].any(1).nonzero()[:, 0].tolist():
            verdicts[self._names[row]] = _fault(table[row])
        return verdicts

    def only(self) -> tuple[float, float]:
        """Wait for the one tensor that was staged; return its squared error and squared norm.

        Raises:
            NonFiniteError: NaN or infinity.
            ScaleError: scales that can't be served.
            TiedError: it differs from the tensor whose place it shares.
        """
        (verdict,) = self.verdicts().values()
        if isinstance(verdict, ValueError):
            raise verdict
        return verdict

    def _reduced(self) -> dict[Columns, list[tuple[Tensor, Tensor]]]:
        """Everything as sums by row, in a few launches whatever the number of parts."""
        reduced = {columns: list(parts) for columns, parts in self._sums.items()}
        if self._blocks:
            rows, blocks = _transposed(self._blocks)
            reduced.setdefault(QUANTIZED, []).append((rows, quantize_weight.totals(blocks)))
        if self._values:
            rows, values = _transposed(self._values)
            reduced.setdefault(COPIED_VALUES, []).append((rows, _not_finite(values).double()[:, None]))
        for columns, parts in self._flags.items():
            rows, flags = _transposed(parts)
            reduced.setdefault(columns, []).append((rows, torch.stack(flags).double()))
        return reduced


def _transposed(parts: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, list[Tensor]]:
    rows, tensors = zip(*parts, strict=True)
    return torch.tensor(rows, dtype=torch.int64), list(tensors)


def _not_finite(parts: list[Tensor]) -> Tensor:
    """For each tensor, whether something in it is NaN or infinite; on a GPU in a few launches whatever their number."""
    if not parts[0].is_cuda:
        return torch.stack([~torch.isfinite(part).all() for part in parts])
    largest = torch.empty(len(parts), dtype=torch.float32, device=parts[0].device)
    for dtype in {part.dtype for part in parts}:
        indices = [index for index, part in enumerate(parts) if part.dtype == dtype]
        norms = torch._foreach_norm([parts[index] for index in indices], float("inf"))
        largest[torch.tensor(indices, device=largest.device)] = torch.stack(norms).float()
    return ~torch.isfinite(largest)


def _fault(row: Tensor) -> NonFiniteError | ScaleError | TiedError:
    if row[Column.DIFFERS]:
        return TiedError("differs from the tensor whose place it shares")
    if row[Column.NOT_FINITE]:
        return NonFiniteError("expected finite values, found NaN or infinity")
    return ScaleError("expected positive scales, powers of two where the server's are")

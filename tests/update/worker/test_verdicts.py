# SPDX-License-Identifier: Apache-2.0
"""Which verdict a tensor gets by what was measured of its parts."""

import pytest
import torch

from vllm_fp8ext.kernels.numerics.reference import NonFiniteError
from vllm_fp8ext.update.worker.verdicts import (
    COMPARED,
    COPIED_CODES,
    COPIED_VALUES,
    QUANTIZED,
    Column,
    ScaleError,
    TiedError,
    VerdictTable,
)


def test_parts_of_batches_and_single_steps_add_up() -> None:
    table = VerdictTable()
    table.add_blocks("alone", torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]]))
    owners, sums = torch.tensor([1, 0, 1]), torch.tensor([[1.0, 5.0, 0.0], [2.0, 6.0, 0.0], [3.0, 7.0, 0.0]])
    table.add_batch(["a", "b"], [(QUANTIZED, owners, sums.double())])
    table.add_blocks("alone", torch.tensor([[5.0, 6.0, 0.0]]))
    assert table.verdicts() == {"alone": (9.0, 12.0), "a": (2.0, 6.0), "b": (4.0, 12.0)}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({Column.NOT_FINITE}, NonFiniteError),
        ({Column.WRONG_SCALES}, ScaleError),
        ({Column.DIFFERS}, TiedError),
        ({Column.NOT_FINITE, Column.WRONG_SCALES}, NonFiniteError),
        ({Column.NOT_FINITE, Column.DIFFERS}, TiedError),
    ],
    ids=str,
)
def test_what_is_wrong_has_its_error(wrong: set[Column], error: type[ValueError]) -> None:
    table = VerdictTable()
    table.add_tensor("good")
    for columns in (COPIED_CODES, COMPARED):
        flags = torch.tensor([column in wrong for column in columns])
        table.add_flags("bad", columns, flags)
        table.add_flags("good", columns, torch.zeros_like(flags))
    verdicts = table.verdicts()
    assert verdicts["good"] == (0.0, 0.0)
    assert isinstance(verdicts["bad"], error)


def test_values_are_looked_at_where_they_were_copied() -> None:
    table, values = VerdictTable(), torch.ones(3)
    table.add_values("a", values)
    table.add_values("empty", torch.empty(0))
    table.add_batch(["b"], [(COPIED_VALUES, torch.tensor([0]), torch.zeros(1, 1, dtype=torch.float64))])
    values[1] = torch.inf
    assert isinstance(table.verdicts()["a"], NonFiniteError)
    assert table.verdicts()["b"] == (0.0, 0.0)

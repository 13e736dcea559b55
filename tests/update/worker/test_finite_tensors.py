# SPDX-License-Identifier: Apache-2.0
"""What is tried where no prompt can be run."""

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.update.worker import finite_tensors as module
from vllm_fp8ext.update.worker.finite_tensors import finite_tensors

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_found(code: int) -> None:
    codes = torch.full((4, 4), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert not finite_tensors([codes], lambda: None).finite


def test_all_other_codes_are_numbers() -> None:
    finite = E4M3[torch.isfinite(E4M3.float())]
    assert len(finite) == 254
    assert finite_tensors([finite], lambda: None).finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_value_is_found_among_tensors(value: float, dtype: torch.dtype) -> None:
    pauses: list[int] = []
    tensors: list[Tensor] = [torch.ones(3, dtype=dtype), torch.arange(3), torch.ones(2, 2, dtype=dtype)]
    assert finite_tensors(tensors, lambda: pauses.append(1)).finite
    tensors[2][1, 1] = value
    score = finite_tensors(tensors, lambda: pauses.append(1))
    assert (score.finite, score.tokens, len(pauses)) == (False, 0, 2)


def test_pauses_come_after_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is a step of all ranks: one after each tensor would take a large model's prepare seconds."""
    monkeypatch.setattr(module, "PAUSE_BYTES", 1000)
    pauses: list[int] = []
    finite_tensors([torch.ones(100) for _ in range(7)], lambda: pauses.append(1))
    assert len(pauses) == 3  # after three of 400 bytes, after six, and at the end

# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen tokens against a softmax in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.sampling.token_logprobs import SLICE, WIDTH, token_logprobs


def expected(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1).gather(-1, tokens.long())


def drawn(rows: int, vocabulary: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=noise).mul_(4).to(dtype)
    return logits, torch.randint(vocabulary, (rows, columns), generator=noise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "columns"),
    [(1, 5, 1), (3, SLICE, 2), (2, SLICE + 1, WIDTH), (2, 3 * SLICE - 7, WIDTH + 1), (130, 64, 6)],
)
def test_they_are_those_of_a_softmax(
    rows: int, vocabulary: int, columns: int, dtype: torch.dtype, device: str
) -> None:
    logits, tokens = drawn(rows, vocabulary, columns, dtype)
    found = token_logprobs(logits.to(device), tokens.to(device))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), expected(logits, tokens), rtol=1e-5, atol=1e-5)


def test_rows_may_lie_apart(device: str) -> None:
    logits, tokens = drawn(4, 96, 3, torch.float32)
    found = token_logprobs(logits.to(device)[:, :80], (tokens % 80).to(device).int()[:, 1:])
    torch.testing.assert_close(
        found.cpu().double(), expected(logits[:, :80], tokens[:, 1:] % 80), rtol=1e-5, atol=1e-5
    )


def test_a_row_is_computed_alike_in_any_company(device: str) -> None:
    logits, tokens = (part.to(device) for part in drawn(9, 2 * SLICE, 1, torch.bfloat16))
    together = token_logprobs(logits, tokens)
    assert torch.equal(together[4:5], token_logprobs(logits[4:5], tokens[4:5]))


def test_masked_logits_count_for_nothing(device: str) -> None:
    """One whole slice is masked, and all but one logit of a row."""
    logits, tokens = drawn(2, 2 * SLICE + 5, 2, torch.float32)
    logits[:, :SLICE] = -torch.inf
    logits[1] = -torch.inf
    logits[1, SLICE] = -3.0
    tokens[0] = torch.tensor([SLICE + 1, 7])
    tokens[1] = torch.tensor([SLICE, 0])
    found = token_logprobs(logits.to(device), tokens.to(device)).cpu()
    torch.testing.assert_close(found.double(), expected(logits, tokens), rtol=1e-5, atol=1e-5)
    assert found[0, 1] == found[1, 1] == -torch.inf
    assert found[1, 0] == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
def test_what_has_no_logarithm_is_nan(device: str) -> None:
    logits, tokens = drawn(3, 40, 1, torch.float32)
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    found = token_logprobs(logits.to(device), tokens.to(device)).isnan().flatten()
    assert found.tolist() == [True, True, False]


def test_nothing_is_asked(device: str) -> None:
    logits = torch.zeros(0, 40, device=device)
    assert token_logprobs(logits, torch.zeros(0, 3, dtype=torch.int64, device=device)).shape == (0, 3)

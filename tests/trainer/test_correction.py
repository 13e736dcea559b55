# SPDX-License-Identifier: Apache-2.0
"""Importance weights, held to references in plain Python's float64 and to what defines them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.trainer.correction import (
    ICEPOP,
    Correction,
    icepop,
    masked_is,
    sequence_tis,
    token_tis,
)
from vllm_fp8ext.trainer.log_ratio import log_ratio

Batch = tuple[Tensor, Tensor, Tensor]
LOGPROBS = st.floats(-30, 0, width=32)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Logprobs of trainer and server, float32, and a bool mask with at least one token."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    size = rows * columns
    trainer, server = (draw(st.lists(LOGPROBS, min_size=size, max_size=size)) for _ in range(2))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    tensors = (torch.tensor(trainer), torch.tensor(server), torch.tensor(mask))
    return tuple(tensor.reshape(rows, columns) for tensor in tensors)  # type: ignore[return-value]


def batch() -> Batch:
    """Ratios of 2.5, 0.4, 1 and 6 in one sequence, of 1.5, 1.5 and two masked tokens in the other."""
    ratios = torch.tensor([[2.5, 0.4, 1.0, 6.0], [1.5, 1.5, 9.0, 9.0]], dtype=torch.float64)
    server = torch.full_like(ratios, -3.0)
    return server + ratios.log(), server, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def reference(batch: Batch, level: str, outside: str, low: float, high: float) -> list[list[float]]:
    """Weights by Python's floats, one token after the other."""

    def bounded(logarithm: float) -> float:
        ratio = math.exp(logarithm)
        if outside == "truncate":
            return min(max(ratio, low), high)
        return ratio if low <= ratio <= high else 0.0

    rows = []
    for trainer, server, mask in zip(*(tensor.tolist() for tensor in batch), strict=True):
        differences = [a - b if counts else 0.0 for a, b, counts in zip(trainer, server, mask, strict=True)]
        if level == "sequence":
            rows.append([bounded(math.fsum(differences)) if any(mask) else 0.0])
        else:
            rows.append(
                [bounded(each) if counts else 0.0 for each, counts in zip(differences, mask, strict=True)]
            )
    return rows


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (token_tis, [[2.0, 0.4, 1.0, 2.0], [1.5, 1.5, 0.0, 0.0]]),
        (sequence_tis, [[2.0], [2.0]]),
        (masked_is, [[0.0], [0.0]]),
        (lambda *inputs: masked_is(*inputs, cap=3.0), [[0.0], [2.25]]),
        (lambda *inputs: masked_is(*inputs, level="token"), [[0.0, 0.4, 1.0, 0.0], [1.5, 1.5, 0.0, 0.0]]),
        (icepop, [[2.5, 0.0, 1.0, 0.0], [1.5, 1.5, 0.0, 0.0]]),
        (ICEPOP.weights, [[2.5, 0.0, 1.0, 0.0], [1.5, 1.5, 0.0, 0.0]]),
        (Correction(low=0.5, high=3.0).weights, [[2.5, 0.5, 1.0, 3.0], [1.5, 1.5, 0.0, 0.0]]),
    ],
    ids=[
        "token-tis",
        "sequence-tis",
        "masked-is",
        "masked-is-3",
        "token-masked-is",
        "icepop",
        "ICEPOP",
        "low",
    ],
)
def test_weights_are_those_of_the_papers(
    function: Callable[..., Tensor], expected: list[list[float]]
) -> None:
    torch.testing.assert_close(function(*batch()), torch.tensor(expected, dtype=torch.float64))


@settings(max_examples=50, deadline=None)
@given(
    batches(),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["truncate", "mask"]),
    st.floats(0, 0.9),
    st.floats(1, 9),
)
def test_weights_match_a_float64_reference(
    batch: Batch, level: Any, outside: Any, low: float, high: float
) -> None:
    rule = Correction(level=level, outside=outside, low=low, high=high)
    wide = (batch[0].double(), batch[1].double(), batch[2])
    expected = torch.tensor(reference(wide, level, outside, low, high), dtype=torch.float64)
    torch.testing.assert_close(rule.weights(*wide), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(batches(), st.floats(0.1, 10))
def test_truncated_weights_are_within_the_cap(batch: Batch, cap: float) -> None:
    for weights in (token_tis(*batch, cap=cap), sequence_tis(*batch, cap=cap)):
        assert 0 <= weights.min() <= weights.max() <= torch.tensor(cap)


@settings(max_examples=30, deadline=None)
@given(batches())
def test_equal_policies_weigh_one(batch: Batch) -> None:
    logprobs, _, mask = batch
    for function in (token_tis, sequence_tis, masked_is, icepop):
        weights = function(logprobs, logprobs, mask)
        counted = mask if weights.shape == mask.shape else mask.any(-1, keepdim=True)
        assert torch.equal(weights, counted.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_are_computed_in_float32_or_wider(dtype: torch.dtype) -> None:
    trainer, server, mask = batch()
    trainer, server = trainer.to(dtype), server.to(dtype)
    weights = token_tis(trainer, server, mask)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(weights.double(), token_tis(trainer.double(), server.double(), mask))


def test_weights_have_no_gradient_and_scale_one() -> None:
    trainer, server, mask = batch()
    trainer.requires_grad_()
    assert not log_ratio(trainer, server, mask).requires_grad
    for function in (token_tis, sequence_tis, masked_is, icepop):
        weights = function(trainer, server, mask)
        assert not weights.requires_grad
        (gradient,) = torch.autograd.grad((trainer * weights * mask).sum(), trainer)
        torch.testing.assert_close(gradient, (weights * mask).double())


def test_long_sequences_of_large_ratios_stay_finite() -> None:
    server = torch.full((1, 10_000), -2.0)
    weights = sequence_tis(server + 1, server, torch.ones(1, 10_000))
    assert weights.tolist() == [[2.0]]
    assert masked_is(server + 1, server, torch.ones(1, 10_000)).tolist() == [[0.0]]


def test_an_untruncated_weight_is_unbiased_and_truncation_bounds_the_bias() -> None:
    """The mean of `w·f` over the server's tokens is the trainer's mean of `f`, but for the truncated tail."""
    generator = torch.Generator().manual_seed(0)
    server = torch.randn(12, generator=generator, dtype=torch.float64).log_softmax(0)
    trainer = (server + torch.randn(12, generator=generator, dtype=torch.float64)).log_softmax(0)
    reward = torch.randn(12, generator=generator, dtype=torch.float64)
    sampled = torch.multinomial(server.exp(), 400_000, replacement=True, generator=generator)[None]
    inputs = trainer[sampled], server[sampled], torch.ones_like(sampled)
    for cap in (math.inf, 2.0):
        products = token_tis(*inputs, cap=cap) * reward[sampled]
        weights = (trainer - server).exp().clamp_max(cap)
        exact = (server.exp() * weights * reward).sum()
        error = products.std() / products.numel() ** 0.5
        assert abs(products.mean() - exact) < 5 * error
        if cap == math.inf:
            torch.testing.assert_close(exact, (trainer.exp() * reward).sum())
        else:
            assert abs(exact - (trainer.exp() * reward).sum()) > 20 * error, "nothing was truncated"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"server": torch.zeros(2, 3)}, r"server_logprobs: expected the shape .*\[2, 4\], found \[2, 3\]"),
        ({"mask": torch.ones(4)}, r"mask: expected a shape \[batch, tokens\], found \[4\]"),
        (
            {"trainer": torch.zeros(2, 4, dtype=torch.int64)},
            "trainer_logprobs: expected a floating dtype, found",
        ),
        (
            {"server": torch.zeros(2, 4, device="meta")},
            "server_logprobs: expected the device .*cpu, found meta",
        ),
        (
            {"server": torch.full((2, 4), math.nan)},
            "server_logprobs: expected finite .* found 6 that are NaN, of 6",
        ),
        (
            {"trainer": torch.full((2, 4), -math.inf)},
            "trainer_logprobs: expected finite .* 6 that are infinite",
        ),
        (
            {"trainer": torch.full((2, 4), 0.5)},
            "trainer_logprobs: expected logprobs, .* found 6 above 0, of 6",
        ),
        ({"mask": torch.zeros(2, 4)}, "mask: expected at least one token that counts, found none of 8"),
        ({"mask": torch.full((2, 4), 0.5)}, "mask: expected 0 and 1 alone, found 8 other values"),
        ({"mask": torch.full((2, 4), math.nan)}, "mask: expected 0 and 1 alone, found 8 other values"),
    ],
)
def test_bad_inputs_are_refused(changed: dict[str, Tensor], message: str) -> None:
    inputs = dict(zip(("trainer", "server", "mask"), batch(), strict=True)) | changed
    with pytest.raises(ValueError, match=message):
        token_tis(*inputs.values())


def test_all_problems_are_listed() -> None:
    with pytest.raises(ValueError, match=r"(?s)server_logprobs: .*mask: "):
        token_tis(torch.zeros(2, 4), torch.zeros(2, 3), torch.zeros(4))


def test_what_is_masked_may_be_anything() -> None:
    trainer, server, mask = batch()
    spoilt = torch.where(mask == 0, torch.nan, trainer), torch.where(mask == 0, -torch.inf, server)
    assert torch.equal(log_ratio(*spoilt, mask), log_ratio(trainer, server, mask))
    assert torch.equal(token_tis(*spoilt, mask), token_tis(trainer, server, mask))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "word"}, "level: expected 'token' or 'sequence', found 'word'"),
        ({"outside": "drop"}, "outside: expected 'truncate' or 'mask', found 'drop'"),
        ({"low": 2.0}, "bounds: expected 0 <= low < high, found low=2.0, high=2.0"),
        ({"high": math.nan}, "bounds: expected 0 <= low < high, found low=0.0, high=nan"),
    ],
)
def test_bad_rules_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Correction(**options)

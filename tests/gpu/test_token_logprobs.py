# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of sampled tokens and their candidates against vLLM's sampler."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_are_vllms(count: int, dtype: torch.dtype) -> None:
    from vllm.v1.worker.gpu.sample import logprob

    from vllm_fp8ext.compat.speed import token_logprobs

    rows, vocabulary = 130, 20_000  # each logit once in a row: no two are equal
    noise = torch.Generator("cuda").manual_seed(count)
    order = torch.stack([torch.randperm(vocabulary, device="cuda", generator=noise) for _ in range(rows)])
    logits = torch.where(order < 256, order / 32, -order / 2000).to(dtype)
    sampled = torch.randint(vocabulary, (rows,), device="cuda", generator=noise)

    def scores(compute: Any) -> Any:
        return compute(logits, count, sampled, None, max_per_req_token_ids=0, logits_mode=False)

    original = logprob.compute_token_logprobs
    expected = scores(logprob.compute_topk_scores)
    logprob.compute_token_logprobs = token_logprobs._wrap_compute(original)
    try:
        found = scores(token_logprobs._wrap_scores(logprob.compute_topk_scores))
    finally:
        logprob.compute_token_logprobs = original
    assert torch.equal(found.logprob_token_ids, expected.logprob_token_ids)
    assert torch.equal(found.selected_token_ranks, expected.selected_token_ranks)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)

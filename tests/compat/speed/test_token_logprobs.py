# SPDX-License-Identifier: Apache-2.0
"""A candidate is put beside sampled tokens as vLLM's sampler does."""

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.compat.speed.token_logprobs import _wrap_scores


class Original:
    """As vLLM's function: the sampled token, then the likeliest ones."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(
        self, logits: Tensor, num_logprobs: int, sampled_token_ids: Tensor, *_: Any, **__: Any
    ) -> Any:
        self.asked.append(num_logprobs)
        best = logits.topk(num_logprobs, -1).indices
        ids = torch.cat((sampled_token_ids[:, None], best), 1)
        logprobs = logits.float().log_softmax(-1).gather(-1, ids)
        ranks = (logits >= logits.gather(-1, sampled_token_ids[:, None])).sum(-1)
        return LogprobsTensors(ids, logprobs, ranks)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_candidates_are_vllms(count: int) -> None:
    logits = torch.randperm(5 * 40, generator=torch.Generator().manual_seed(count)).view(5, 40) / 16
    sampled = torch.tensor([3, 39, 0, 7, int(logits[4].argmax())])
    original = Original()
    found = _wrap_scores(original)(logits, count, sampled, None, max_per_req_token_ids=0, logits_mode=False)
    assert original.asked == ([0] if count == 1 else [count])
    expected = Original()(logits, count, sampled)
    assert torch.equal(found.logprob_token_ids, expected.logprob_token_ids)
    assert torch.equal(found.selected_token_ranks, expected.selected_token_ranks)
    torch.testing.assert_close(found.logprobs, expected.logprobs)


@pytest.mark.parametrize("others", [{"max_per_req_token_ids": 2}, {"logits_mode": True}])
def test_what_is_asked_otherwise_is_left_to_vllm(others: dict[str, Any]) -> None:
    original = Original()
    _wrap_scores(original)(torch.zeros(2, 4), 1, torch.tensor([0, 1]), **others)
    assert original.asked == [1]

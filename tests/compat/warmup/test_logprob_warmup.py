# SPDX-License-Identifier: Apache-2.0
"""For which numbers of log-probabilities vLLM's kernel is compiled. That nothing is left, `tests/gpu` shows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu.sample import logprob

from vllm_fp8ext.compat.warmup import logprob_warmup


@pytest.mark.parametrize("most", [1, 2, 16, 21, 22, 49, 1024, 5000])
def test_each_number_is_compiled_as_one_that_was_warmed_up(most: int) -> None:
    """The kernel takes the next power of two, at most 1,024 at once; Triton compiles 1 and multiples of 16 apart."""

    def variant(count: int) -> tuple[int, bool, bool]:
        block = 1
        while block < count and block < 1024:
            block *= 2
        return block, count == 1, count % 16 == 0

    run = logprob_warmup.columns(most)
    assert {variant(count) for count in run} == {variant(count) for count in range(1, most + 1)}
    assert len({variant(count) for count in run}) == len(run)
    assert max(run) <= most


@pytest.mark.parametrize(("most", "columns"), [(20, {1, 2, 3, 5, 9, 16, 17}), (0, {1}), (-1, {1, 2, 3})])
def test_a_warm_up_computes_them_all(monkeypatch: pytest.MonkeyPatch, most: int, columns: set[int]) -> None:
    ran: list[tuple[tuple[int, ...], torch.dtype, tuple[int, ...], bool]] = []
    answer = torch.zeros(2, 6)

    def compute(logits: Tensor, token_ids: Tensor) -> Tensor:
        ran.append((logits.shape, logits.dtype, token_ids.shape, token_ids.is_contiguous()))
        return answer

    def warm_up(runner: Any, execute: Any, sample: Any) -> None:
        """As vLLM's: its sampler asks for six columns."""
        assert (execute, sample) == ("execute", "sample")
        assert logprob.compute_token_logprobs(torch.zeros(2, 4), torch.zeros(2, 6)) is answer

    monkeypatch.setattr(logprob, "compute_token_logprobs", compute)
    monkeypatch.setattr(gpu_worker, "warmup_kernels", warm_up)
    logprob_warmup.install()
    logprob_warmup.install()
    model = SimpleNamespace(max_logprobs=most, dtype=torch.bfloat16, get_vocab_size=lambda: 3)
    gpu_worker.warmup_kernels(SimpleNamespace(model_config=model), "execute", "sample")

    assert ran.pop() == ((2, 4), torch.float32, (2, 6), True)
    dtypes = torch.bfloat16, torch.float32
    assert set(ran) == {((1, 4), dtype, (1, count), True) for dtype in dtypes for count in columns}
    assert len(ran) == 2 * len(columns)
    assert logprob.compute_token_logprobs is compute


def test_a_warm_up_that_fails_leaves_the_kernel_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = logprob.compute_token_logprobs

    def warm_up(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_worker, "warmup_kernels", warm_up)
    logprob_warmup.install()
    model = SimpleNamespace(max_logprobs=20, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu_worker.warmup_kernels(SimpleNamespace(model_config=model), None, None)
    assert logprob.compute_token_logprobs is compute

# SPDX-License-Identifier: Apache-2.0
"""Which kernels that mask logits are compiled at the start. That they are those of requests, `tests/gpu` shows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.model_executor.warmup.jit_warmup_triton_helper import TritonCompileKey, TritonWarmupTensor
from vllm.v1.sample.ops import topk_topp_sampler

from vllm_fp8ext.compat.warmup.mask_warmup import warm_up_masks
from vllm_fp8ext.kernels.runtime.launch import compiled_as


class Kernel:
    """As vLLM's: one key for each distance of rows that it lists."""

    def __init__(self, name: str, compiled: list[Any]) -> None:
        self.name = name
        self.compiled = compiled

    def get_warmup_keys(self, *, vllm_config: Any) -> list[TritonCompileKey]:
        assert vllm_config.model_config.get_vocab_size()
        collected = []
        for stride in (16, 2):
            logits: Any = TritonWarmupTensor("float32", shape=(1, 7), strides=(stride, 1))
            collected.append(TritonCompileKey(frozenset(), (("p", None), ("logits", logits))))
        return collected

    def compile_many(self, keys: Any) -> None:
        self.compiled += [(self.name, dict(key.inputs)["logits"].stride(0)) for key in keys]


@pytest.mark.parametrize(("vocabulary", "strides"), [(151936, [16]), (50257, [16, 2]), (50258, [16, 2])])
def test_the_kernels_that_vllm_registers_are_compiled_for_rows_of_this_vocabulary(
    vocabulary: int, strides: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for a lone row of a padded one."""
    compiled: list[Any] = []

    def register() -> None:
        for name in ("both", "split"):
            kernel: Any = Kernel(name, compiled)
            JitWarmupRegistry.register(kernel)

    monkeypatch.setattr(topk_topp_sampler, "register_top_k_top_p_warmups", register)
    config: Any = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary))
    warm_up_masks(config)
    assert compiled == [(name, stride) for name in ("both", "split") for stride in strides]
    for rows in (1, 2):
        logits = torch.empty(rows, vocabulary + -vocabulary % 64, dtype=torch.bfloat16)[:, :vocabulary]
        copied = torch.empty_like(logits, dtype=torch.float32)
        assert compiled_as(copied.stride(0)) in {compiled_as(stride) for stride in strides}


def test_kernels_that_can_not_be_compiled_are_left_to_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Kernel):
        def compile_many(self, keys: Any) -> None:
            raise RuntimeError("no assembler")

    def register() -> None:
        kernel: Any = Broken("both", [])
        JitWarmupRegistry.register(kernel)

    monkeypatch.setattr(topk_topp_sampler, "register_top_k_top_p_warmups", register)
    config: Any = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 64))
    warm_up_masks(config)
    assert "when they are needed: no assembler" in caplog.text

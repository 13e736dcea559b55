# SPDX-License-Identifier: Apache-2.0
"""Which kernels that mask logits are compiled at the start. That they are those of requests, `tests/gpu` shows."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.model_executor.warmup.jit_warmup_triton_helper import TritonCompileKey, TritonWarmupTensor
from vllm.v1.sample.ops import topk_topp_sampler

from vllm_fp8ext.compat.mask_warmup import warm_up_masks


class Kernel:
    """As vLLM's: one key for each distance of rows that it lists."""

    def __init__(self, name: str, compiled: list[Any]) -> None:
        self.name = name
        self.compiled = compiled

    def get_warmup_keys(self, *, vllm_config: Any) -> list[TritonCompileKey]:
        assert vllm_config.model_config.get_vocab_size()
        found = []
        for stride in (16, 2):
            logits: Any = TritonWarmupTensor("float32", shape=(1, 7), strides=(stride, 1))
            found.append(TritonCompileKey(frozenset(), (("p", None), ("logits", logits))))
        return found

    def compile_many(self, keys: Any) -> None:
        self.compiled += [(self.name, dict(key.inputs)["logits"].stride(0)) for key in keys]


@pytest.mark.parametrize(("vocabulary", "stride"), [(151936, 16), (50257, 2), (50258, 2)])
def test_the_kernels_that_vllm_registers_are_compiled_for_rows_of_this_vocabulary(
    vocabulary: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []

    def register() -> None:
        for name in ("both", "split"):
            kernel: Any = Kernel(name, compiled)
            JitWarmupRegistry.register(kernel)

    monkeypatch.setattr(topk_topp_sampler, "register_top_k_top_p_warmups", register)
    config: Any = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary))
    warm_up_masks(config)
    assert compiled == [("both", stride), ("split", stride)]

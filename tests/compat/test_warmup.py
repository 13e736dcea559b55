# SPDX-License-Identifier: Apache-2.0
"""Which kernels are compiled before a server is ready."""

from types import SimpleNamespace

import pytest
import torch

from vllm_fp8ext.kernels import decode_cuts
from vllm_fp8ext.kernels.selection import Route

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")


@pytest.mark.parametrize(
    ("route", "quantized", "inside"),
    [
        (Route(64, "deep_gemm"), (8, 16, 32, 64), (8, 16)),
        (Route(8, "deep_gemm"), (8,), (8,)),
        (Route(0, "cutlass"), (), ()),
        (Route(32, "decode_gemm"), decode_cuts.TOKENS, (8, 16)),
        (Route(0, "decode_gemm"), decode_cuts.TOKENS, ()),
    ],
    ids=str,
)
def test_every_width_that_a_layer_can_take(
    route: Route, quantized: tuple[int, ...], inside: tuple[int, ...]
) -> None:
    from vllm_fp8ext.compat.warmup import _decode_kernels

    found = _decode_kernels(SimpleNamespace(route=route))  # type: ignore[arg-type]  # all that it looks at
    assert [tokens for tokens, before in found if before] == list(quantized)
    assert [tokens for tokens, before in found if not before] == list(inside)


@pytest.mark.parametrize("few", [0, 8, 32, 60, 128])
@pytest.mark.parametrize("most", [64, 700, 2048])
def test_deep_gemm_is_run_for_every_number_of_its_blocks(
    monkeypatch: pytest.MonkeyPatch, few: int, most: int
) -> None:
    """Its blocks have 64, 128 or 256 rows, or 16 or 32 where there are no more tokens; it counts them to choose a kernel."""
    from vllm.model_executor.warmup import deep_gemm_warmup

    from vllm_fp8ext.compat.warmup import _tokens

    monkeypatch.setattr(deep_gemm_warmup, "num_compute_units", lambda index: 132)
    layer, method = (
        SimpleNamespace(weight=torch.empty(512, 128)),
        SimpleNamespace(route=Route(few, "deep_gemm")),
    )

    def blocks(count: int) -> tuple[int, ...]:
        return count <= 16, count <= 32, -(-count // 64)

    run = {blocks(count) for count in _tokens(layer, method, most)}  # type: ignore[arg-type]  # all that it looks at
    assert {blocks(count) for count in range(few + 1, most + 1)} <= run

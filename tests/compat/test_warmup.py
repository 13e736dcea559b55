# SPDX-License-Identifier: Apache-2.0
"""Which kernels are compiled before a server is ready."""

from types import SimpleNamespace

import pytest

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

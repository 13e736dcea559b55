# SPDX-License-Identifier: Apache-2.0
"""How the decode GEMM is cut and what it refuses; its results are tested in `tests/gpu`."""

import pytest
import torch

from vllm_fp8ext.kernels import cases, cuda, decode_gemm
from vllm_fp8ext.kernels.decode_gemm import Config
from vllm_fp8ext.kernels.reference import BLOCK, blocks


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("m", [*cases.DECODE_TOKENS, 100, 128])
@pytest.mark.parametrize("shape", [*cases.LINEAR.values(), (1, 16), (20001, 1024)], ids=str)
def test_the_chosen_cut_fits(shape: tuple[int, int], m: int, quantized: bool) -> None:
    n, k = shape
    tokens = decode_gemm.width(m)
    assert m <= tokens <= decode_gemm.TOKENS[-1]
    assert decode_gemm.usable(m, n, k)
    config = decode_gemm.choose(n, k, tokens, quantized=quantized)
    assert config.fits(tokens, k)
    assert config.splits <= blocks(k)
    assert config.shared_bytes(tokens, k) <= cuda.MOST_SHARED_BYTES
    assert config.ring(tokens, k) * config.rows * BLOCK < config.shared_bytes(tokens, k)


@pytest.mark.parametrize(
    "shape", [(0, 8, 16), (129, 8, 16), (1, 0, 16), (1, 8, 0), (1, 8, 24), (8, 8, 1 << 20)]
)
def test_shapes_that_it_does_not_take(shape: tuple[int, int, int]) -> None:
    assert not decode_gemm.usable(*shape)


def test_everything_wrong_is_said_at_once() -> None:
    x, codes, scales = torch.zeros(1, 40), torch.zeros(8, 24, dtype=torch.uint8), torch.zeros(2, 1)
    bias = torch.zeros(7)
    with pytest.raises(ValueError, match="decode_gemm: expected") as caught:
        decode_gemm.decode_gemm(x, codes, scales, bias, "fp32", Config(rows=64, splits=1))
    for text in ("weights of 40 columns", "multiples of 16, found 40", "BF16 activations", "E4M3 codes"):
        assert text in str(caught.value)
    for text in ("fp32 scales [1, 1], found [2, 1]", "rows of weights that begin", "BF16 bias [8]"):
        assert text in str(caught.value)

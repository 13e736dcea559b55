# SPDX-License-Identifier: Apache-2.0
"""How the decode GEMM is tiled and what it refuses; its results are tested in `tests/gpu`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_fp8ext.kernels.gemm import decode_gemm, decode_gemm_configs
from vllm_fp8ext.kernels.gemm.decode_gemm_configs import TileConfig
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK, FP8_DTYPE, blocks
from vllm_fp8ext.kernels.runtime import cuda_kernel
from vllm_fp8ext.kernels.runtime.cuda_kernel import CudaError
from vllm_fp8ext.kernels.testing import kernel_cases


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("m", [*kernel_cases.DECODE_TOKENS, 100, 128])
@pytest.mark.parametrize("shape", [*kernel_cases.LINEAR.values(), (1, 16), (20001, 1024)], ids=str)
def test_the_chosen_config_fits(shape: tuple[int, int], m: int, quantized: bool) -> None:
    n, k = shape
    tokens = decode_gemm_configs.width(m)
    assert m <= tokens <= decode_gemm_configs.TOKENS[-1]
    assert decode_gemm_configs.usable(m, n, k)
    config = decode_gemm_configs.choose(n, k, tokens, quantized=quantized)
    assert config.fits(tokens, k)
    assert config.splits <= blocks(k)
    assert config.shared_bytes(tokens, k) <= cuda_kernel.MOST_SHARED_BYTES
    assert config.ring(tokens, k) * config.rows * BLOCK < config.shared_bytes(tokens, k)


@pytest.mark.parametrize(
    "shape", [(0, 8, 16), (129, 8, 16), (1, 0, 16), (1, 8, 0), (1, 8, 24), (8, 8, 1 << 20)]
)
def test_shapes_that_it_does_not_take(shape: tuple[int, int, int]) -> None:
    assert not decode_gemm_configs.usable(*shape)


def test_everything_wrong_is_said_at_once() -> None:
    x, codes, scales = torch.zeros(1, 40), torch.zeros(8, 24, dtype=torch.uint8), torch.zeros(2, 1)
    bias = torch.zeros(7)
    with pytest.raises(ValueError, match="decode_gemm: expected") as caught:
        decode_gemm.decode_gemm(x, codes, scales, bias, "fp32", TileConfig(rows=64, splits=1))
    for text in ("weights of 40 columns", "multiples of 16, found 40", "BF16 activations", "E4M3 codes"):
        assert text in str(caught.value)
    for text in ("fp32 scales [1, 1], found [2, 1]", "rows of weights that begin", "BF16 bias [8]"):
        assert text in str(caught.value)


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts tile configs in place of those that this project has measured in layers: of one shape and number of tokens."""

    def put(n: int, k: int, tokens: int, config: decode_gemm_configs.ConfigKey | None) -> None:
        file = tmp_path / "decode_gemm_configs_in_layers.json"
        file.write_text(json.dumps({"cases": [{"n": n, "k": k, "tokens": tokens, "config": config}]}))
        monkeypatch.setattr(decode_gemm_configs, "_LAYERS", file)
        _forget()

    yield put
    _forget()


def _forget() -> None:
    decode_gemm_configs._in_layers.cache_clear()
    decode_gemm_configs.most_in_layers.cache_clear()
    decode_gemm_configs.choose.cache_clear()


def test_a_shape_that_was_measured_in_a_layer_gets_the_config_that_was_the_fastest_there(
    layers: Callable[..., None],
) -> None:
    n, k = 4096, 4096
    alone = {
        tokens: decode_gemm_configs.choose(n, k, tokens, quantized=False)
        for tokens in decode_gemm_configs.TOKENS
    }
    layers(n, k, 16, (192, 4, True, False))
    result = decode_gemm_configs.choose(n, k, 16, quantized=True)
    assert decode_gemm_configs.config_key(result, 16, k) == (192, 4, True, False)
    assert decode_gemm_configs.choose(n, k, 16, quantized=False) == alone[16], "activations that come in BF16"
    for shape in ((n, k, 32), (n + 128, k, 16)):
        assert decode_gemm_configs.choose(*shape, quantized=True) == decode_gemm_configs.fastest_alone(
            *shape, quantized=True
        )
    fewer = decode_gemm_configs.choose(n, k, 16, quantized=True, most_splits=2)
    assert fewer == decode_gemm_configs.fastest_alone(n, k, 16, quantized=True, most_splits=2)


def test_a_config_in_a_layer_that_does_not_fit_is_left(layers: Callable[..., None]) -> None:
    layers(4096, 12288, 128, (256, 1, False, False))
    shape = (4096, 12288, 128)
    assert decode_gemm_configs.choose(*shape, quantized=True) == decode_gemm_configs.fastest_alone(
        *shape, quantized=True
    )


def test_a_layer_that_was_faster_with_another_kernel_says_nothing_of_configs(
    layers: Callable[..., None],
) -> None:
    layers(4096, 4096, 16, None)
    shape = (4096, 4096, 16)
    assert decode_gemm_configs.choose(*shape, quantized=True) == decode_gemm_configs.fastest_alone(
        *shape, quantized=True
    )


def test_every_config_that_was_the_fastest_in_a_layer_is_taken() -> None:
    table = json.loads(decode_gemm_configs._LAYERS.read_text())
    for case in table["cases"]:
        shape = case["n"], case["k"], case["tokens"]
        if case["config"]:
            result = decode_gemm_configs.choose(*shape, quantized=True)
            assert list(decode_gemm_configs.config_key(result, case["tokens"], case["k"])) == case["config"]
        before, after = case["layer_us"]
        assert 0 < after <= before
        assert table["runs"][case["run"]]["gpus"]


def test_a_measured_shape_gets_its_fastest_config() -> None:
    for case in decode_gemm_configs._table():
        n, k, tokens, quantized = (case[part] for part in ("n", "k", "tokens", "quantized"))
        times = {tuple(config): us for *config, us in case["configs"]}
        config = decode_gemm_configs.fastest_alone(n, k, tokens, quantized=quantized)
        assert times[decode_gemm_configs.config_key(config, tokens, k)] == min(times.values())


def test_a_shape_like_measured_ones_gets_what_was_fast_for_them() -> None:
    assert decode_gemm_configs.fastest_alone(24500, 4096, 64, quantized=True).rows >= 128
    assert decode_gemm_configs.fastest_alone(4000, 4096, 16, quantized=True).splits > 1
    assert not decode_gemm_configs.fastest_alone(24500, 4096, 64, quantized=False).stream


def test_activations_of_the_ring_come_quantized() -> None:
    x, codes, scales = torch.zeros(8, 128).bfloat16(), torch.zeros(8, 128).to(FP8_DTYPE), torch.zeros(1, 1)
    config = TileConfig(rows=64, splits=1, stream=True)
    with pytest.raises(ValueError, match="quantized activations for the ring"):
        decode_gemm.decode_gemm(x, codes, scales, None, "fp32", config)


def test_scales_of_activations_are_laid_out_for_the_copy_engine() -> None:
    codes, scales = torch.zeros(8, 256).to(FP8_DTYPE), torch.zeros(1, 2)
    x = Quantized(torch.zeros(3, 256).to(FP8_DTYPE), torch.zeros(2, 3).t())
    with pytest.raises(ValueError, match="with adjacent tokens, aligned columns"):
        decode_gemm.decode_gemm(x, codes, scales, None, "fp32")


@pytest.mark.parametrize("told", [0, CudaError("cuOccupancyMaxActiveClusters: invalid cluster size (912)")])
def test_a_gpu_without_room_for_a_large_cluster_takes_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch, told: int | CudaError
) -> None:
    asked: list[int] = []

    def resident(splits: int) -> int:
        asked.append(splits)
        if splits <= 4:
            return 128
        if isinstance(told, CudaError):
            raise told
        return told

    def kernel(_rows: int, splits: int, *_: Any) -> Any:
        return SimpleNamespace(resident_blocks=lambda _: resident(splits))

    monkeypatch.setattr(decode_gemm, "_kernel", kernel)
    shape = (4096, 12288, 16)
    assert decode_gemm_configs.choose(*shape, quantized=False).splits == 16
    result = decode_gemm._chosen.__wrapped__(*shape, "fp32", False, 0)
    assert asked[0] == 16
    assert result.splits == asked[-1] <= 4
    assert result == decode_gemm_configs.choose(*shape, quantized=False, most_splits=result.splits)


@pytest.mark.parametrize("most", decode_gemm_configs.SPLITS)
def test_a_measured_shape_takes_the_fastest_config_that_was_measured_with_so_few_splits(most: int) -> None:
    for case in decode_gemm_configs._table():
        n, k, tokens = case["n"], case["k"], case["tokens"]
        measured = {tuple(kind): us for *kind, us in case["configs"] if kind[1] <= most}
        if measured:
            result = decode_gemm_configs.fastest_alone(
                n, k, tokens, quantized=case["quantized"], most_splits=most
            )
            assert measured.get(decode_gemm_configs.config_key(result, tokens, k)) == min(
                measured.values()
            ), (
                n,
                k,
                tokens,
            )


def test_what_takes_more_splits_than_a_gpu_has_is_told() -> None:
    with pytest.raises(ValueError, match="no tile config of 64x65536 for 16 tokens has 1 splits or fewer"):
        decode_gemm_configs.choose(64, 65536, 16, quantized=False, most_splits=1)

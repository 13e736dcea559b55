# SPDX-License-Identifier: Apache-2.0
"""Which kernels are compiled before a server is ready."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_fp8ext.config import Settings
from vllm_fp8ext.kernels.gemm import decode_gemm_configs
from vllm_fp8ext.kernels.gemm.selection import GemmRoute

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")


@pytest.mark.parametrize(
    ("route", "quantized", "inside"),
    [
        (GemmRoute(64, "deep_gemm"), (8, 16, 32, 64), (8, 16)),
        (GemmRoute(8, "deep_gemm"), (8,), (8,)),
        (GemmRoute(0, "cutlass"), (), ()),
        (GemmRoute(32, "decode_gemm"), decode_gemm_configs.TOKENS, (8, 16)),
        (GemmRoute(0, "decode_gemm"), decode_gemm_configs.TOKENS, ()),
    ],
    ids=str,
)
def test_every_width_that_a_layer_can_take(
    route: GemmRoute, quantized: tuple[int, ...], inside: tuple[int, ...]
) -> None:
    from vllm_fp8ext.compat.warmup.warmup import _decode_kernels

    result = _decode_kernels(SimpleNamespace(route=route))  # type: ignore[arg-type]  # all that it looks at
    assert [tokens for tokens, before in result if before] == list(quantized)
    assert [tokens for tokens, before in result if not before] == list(inside)


@pytest.mark.parametrize("decode_tokens", [0, 8, 32, 60, 128])
@pytest.mark.parametrize("most", [64, 700, 2048])
def test_deep_gemm_is_run_for_every_number_of_its_blocks(
    monkeypatch: pytest.MonkeyPatch, decode_tokens: int, most: int
) -> None:
    """Its blocks have 64, 128 or 256 rows, or 16 or 32 where there are no more tokens; it counts them to choose a kernel."""
    from vllm.model_executor.warmup import deep_gemm_warmup

    from vllm_fp8ext.compat.warmup.warmup import _tokens

    monkeypatch.setattr(deep_gemm_warmup, "num_compute_units", lambda index: 132)
    layer, method = (
        SimpleNamespace(weight=torch.empty(512, 128)),
        SimpleNamespace(route=GemmRoute(decode_tokens, "deep_gemm")),
    )

    def blocks(count: int) -> tuple[int, ...]:
        return count <= 16, count <= 32, -(-count // 64)

    run = {blocks(count) for count in _tokens(layer, method, most)}  # type: ignore[arg-type]  # all that it looks at
    assert {blocks(count) for count in range(decode_tokens + 1, most + 1)} <= run


def layer_of(route: GemmRoute) -> tuple[Any, Any]:
    """One, and its method: all that is looked at."""
    layer = SimpleNamespace(weight=torch.empty(8, 256), weight_scale_inv=None)
    return layer, SimpleNamespace(route=route, scale_format="fp32", out_dtype=torch.bfloat16, columns=None)


@pytest.mark.parametrize(
    ("route", "wanted"),
    [(GemmRoute(0, "cutlass"), {False}), (GemmRoute(8, "cutlass"), {False, True})],
    ids=str,
)
@pytest.mark.parametrize("gemma", [False, True])
def test_norms_are_run_for_few_tokens_where_the_decode_gemm_takes_them(
    route: GemmRoute, wanted: set[bool], gemma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fp8ext.compat.warmup import warmup

    seen: set[tuple[bool, bool]] = set()

    def norm(_x: Any, residual: Any, *_: Any, small_m: bool, adds_one: bool, width: int) -> None:
        assert (adds_one, width) == (gemma, 256)
        seen.add((small_m, residual is None))

    for name in ("warm_up_quantizers", "_quantize"):
        monkeypatch.setattr(warmup, name, lambda *_: None)
    monkeypatch.setattr(warmup, "rmsnorm_quantize", norm)
    monkeypatch.setattr(warmup.decode_gemm, "decode_gemm", lambda *_: None)
    warmup._run(*layer_of(route), 8, {gemma})
    assert seen == {(small_m, alone) for small_m in wanted for alone in (False, True)}


@pytest.mark.parametrize("most", [1, 3, 4, 9])
def test_quantizers_are_run_for_one_token_to_a_program_and_for_several(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fp8ext.compat.warmup import warmup
    from vllm_fp8ext.kernels.quantize import gated_quantize, quantize_activation

    launched: set[tuple[Any, ...]] = set()

    def launch(_grid: Any, _tensors: Any, _numbers: Any, _others: Any, constants: Any, _warps: int) -> None:
        launched.add(constants)

    for module in (gated_quantize, quantize_activation):
        monkeypatch.setattr(module, "_launch", launch)
    for name in ("warm_up_quantizers", "rmsnorm_quantize"):
        monkeypatch.setattr(warmup, name, lambda *_, **__: None)
    monkeypatch.setattr(quantize_activation, "_LARGE_M", 4)
    warmup._run(*layer_of(GemmRoute(0, "cutlass")), most)
    run = set(launched)
    for count in range(1, most + 1):
        warmup._quantize(torch.zeros(count, 512, dtype=torch.bfloat16), "fp32")
    assert run == launched
    assert len(run) == (4 if most < 4 else 8)


@pytest.mark.parametrize("decode_tokens", [0, 1, 16, 40, 700])
@pytest.mark.parametrize("most", [1, 64, 700, 2048])
@pytest.mark.parametrize(
    "sizes",
    [{}, {8: "64x128"}, {1: "16x64", 16: "16x64", 48: "64x128", 512: "16x64", 4096: "128x128"}],
    ids=("untuned", "one", "tuned"),
)
def test_every_variant_of_vllms_triton_kernel_is_run(
    decode_tokens: int, most: int, sizes: dict[int, str]
) -> None:
    """It takes the blocks tuned for the nearest number of tokens; Triton compiles 1 and multiples of 16 apart."""
    from vllm_fp8ext.layers.gemm_kernels.triton import variants

    def variant(count: int) -> tuple[str, bool, bool]:
        nearest = min(sizes, key=lambda tuned: abs(tuned - count), default=0)
        return sizes.get(nearest, ""), count == 1, count % 16 == 0

    served = range(decode_tokens + 1, most + 1)
    run = variants(sizes, served)
    assert set(run) <= set(served)
    assert len({variant(count) for count in run}) == len(run)
    assert {variant(count) for count in run} == {variant(count) for count in served}


def test_blocks_are_those_that_vllm_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    import json
    from pathlib import Path

    from vllm.model_executor.layers.quantization.utils import fp8_utils

    from vllm_fp8ext.layers.gemm_kernels.triton import block_sizes

    folder = Path(fp8_utils.__file__).parent / "configs"
    name = "N=1536,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    monkeypatch.setattr(fp8_utils, "get_device_name_as_file_name", lambda: "NVIDIA_H200")
    fp8_utils.get_w8a8_block_fp8_configs.cache_clear()
    try:
        result = block_sizes(1536, 7168)
        tuned = json.loads((folder / name).read_text())
        assert {str(count): json.loads(sizes) for count, sizes in result.items()} == tuned
        assert block_sizes(1536, 7169) == {}
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert block_sizes(1536, 7168) == {}
    finally:
        fp8_utils.get_w8a8_block_fp8_configs.cache_clear()


@pytest.mark.parametrize(
    ("kv_scales", "batched", "most"),
    [
        (None, 2048, 2048),
        ({"policy": "calibrate"}, 2048, 4096),
        ({"policy": "calibrate", "tokens": 1000}, 2048, 2048),
        ({"policy": "history", "tokens": 9000}, 2048, 9000),
        ("provided", 2048, 4096),
        ("static", 2048, 2048),
    ],
)
def test_a_calibration_may_run_more_tokens_than_a_step(kv_scales: Any, batched: int, most: int) -> None:
    from vllm_fp8ext.compat.update.worker import _most_tokens

    settings = Settings.parse({"fp8ext": {"kv_scales": kv_scales} if kv_scales else {}})
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=batched))
    assert _most_tokens(settings, config) == most

# SPDX-License-Identifier: Apache-2.0
"""Finds the kernels and tile configs with which a layer is the fastest on this GPU.

Candidates are DeepGEMM, and the decode GEMM with one of the tile configs that are the fastest alone (`kernel_sweep.py`),
which also decide how early the launches behind it begin.

    python benchmarks/layer_sweep.py --models Qwen3-8B --table kernels/gemm/decode_gemm_configs_in_layers.json

The launches of a layer in a decode step, in a CUDA graph, over the weights and caches of several layers: norm, QKV, norm of
heads and rotary embedding, attention over an FP8 KV cache, output projection, norm, gate and up, activation function, down.
One GEMM is changed at a time, from what the table has of the layer, or else from what is the fastest alone (`crossover.py`,
which also compiles DeepGEMM's kernels, in several processes). Where two layers have weights of one shape, it stays as the
first one wants it: of the models here, in order, and before these of those that the table has of others. --table is written
after each number of tokens.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.bench.measured import Measured
from vllm_fp8ext.bench.projections import MODELS
from vllm_fp8ext.kernels.attention.decode_attention import DecodeAttention, DecodeStep
from vllm_fp8ext.kernels.attention.norm_rope import norm_rope
from vllm_fp8ext.kernels.gemm import decode_gemm_configs, selection
from vllm_fp8ext.kernels.gemm.decode_gemm import decode_gemm
from vllm_fp8ext.kernels.gemm.decode_gemm_configs import TileConfig
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized, empty
from vllm_fp8ext.kernels.quantize.gated_quantize import gated_quantize
from vllm_fp8ext.kernels.quantize.rmsnorm_quantize import rmsnorm_quantize
from vllm_fp8ext.kernels.testing import kernel_cases, kernel_timing
from vllm_fp8ext.layers.gemm_kernels import DEEP_GEMM

CONTEXT = 1536
"""Tokens of each request."""
MOST_REQUESTS = 256
"""That attention has room for."""
ROUNDS, REPEATS = 3, 7
GAIN = 0.003
"""Share of a layer's time for which other tile configs are taken than those that are the fastest alone."""
Shape = tuple[int, int]
TileConfigs = dict[Shape, TileConfig | None]
"""None: DeepGEMM."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-8B"])
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="tensor-parallel sizes")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        choices=decode_gemm_configs.TOKENS,
        default=decode_gemm_configs.TOKENS,
    )
    parser.add_argument("--seconds", type=float, default=300, help="begin no layer after so long")
    parser.add_argument("--table", type=Path, required=True, help="put what is found into this file")
    options = parser.parse_args()
    chosen = [(model, parts) for parts in options.tp for model in options.models]
    start, table = time.monotonic(), Measured(options.table, ("n", "k", "tokens"))
    known = table.cases
    settled = _tile_configs(case for case in known if (case["model"], case["tp"]) not in chosen)
    for model, parts in chosen:
        layers = Layers(model, parts)
        previous = _tile_configs(case for case in known if (case["model"], case["tp"]) == (model, parts))
        for tokens in options.tokens:
            if time.monotonic() - start > options.seconds:
                print(f"no time left for {model} of {parts} with {tokens} tokens")
                continue
            print(f"{model} of {parts}, {tokens} tokens: ", end="", flush=True)
            fastest, times = _tried(layers, tokens, settled.setdefault(tokens, {}), previous.get(tokens, {}))
            facts = {"model": model, "tp": parts, "layer_us": times}
            for (n, k), config in fastest.items():
                settled[tokens][n, k] = config
                kind = config and decode_gemm_configs.config_key(config, tokens, k)
                table.put({"n": n, "k": k, "tokens": tokens, "config": kind} | facts)
    return 0


def _tile_configs(cases: Iterable[dict[str, Any]]) -> dict[int, TileConfigs]:
    """Return a table's entries by tokens, without tile configs that there are no more."""
    fastest: dict[int, TileConfigs] = {}
    for case in cases:
        n, k, tokens, kind = case["n"], case["k"], case["tokens"], case["config"]
        config = kind and decode_gemm_configs.find_config(n, k, tokens, tuple(kind), quantized=True)
        if bool(config) == bool(kind):
            fastest.setdefault(tokens, {})[n, k] = config
    return fastest


class DecodeBatch:
    """A token of each of some requests, and where its K and V lie in the caches of some layers."""

    def __init__(self, requests: int, hidden: int, kv_heads: int, layers: int) -> None:
        self.x_MK, self.residual_MK = (
            kernel_cases.activations(requests, hidden, "cuda", seed) for seed in (0, 1)
        )
        self.positions_M, self.cos_sin_PD, self.norms, _ = kernel_cases.rotary(requests, "cuda")
        each = CONTEXT // kernel_cases.KV_BLOCK
        shape = (requests * each, kv_heads, kernel_cases.KV_BLOCK, 2 * kernel_cases.HEAD_DIM)
        codes = torch.randint(0, 0x60, shape, dtype=torch.uint8, device="cuda")
        self.caches = [codes.clone() for _ in range(layers)]
        self.table_RB = torch.randperm(requests * each, device="cuda").view(requests, each).int()
        self.lengths_R = torch.full((requests,), CONTEXT, dtype=torch.int32, device="cuda")
        self.slots_R = (self.table_RB[:, -1].long() + 1) * kernel_cases.KV_BLOCK - 1


class Layers:
    """Weights of some layers of one of `parts` ranks, more than the L2 cache holds."""

    def __init__(self, model: str, parts: int) -> None:
        self.hidden, intermediate, q, kv = MODELS[model]
        q, kv = q // parts, kv // parts
        self.heads, self.kv_heads = q // kernel_cases.HEAD_DIM, kv // kernel_cases.HEAD_DIM
        self.shapes = (
            (q + 2 * kv, self.hidden),
            (self.hidden, q),
            (2 * intermediate // parts, self.hidden),
            (self.hidden, intermediate // parts),
        )
        made = [reference.quantize_weight(kernel_cases.weight(*shape, "cuda")) for shape in self.shapes]
        self.count = kernel_timing.copies(sum(codes.numel() for codes, _ in made))
        self.weights = [[(codes.clone(), scales) for codes, scales in made] for _ in range(self.count)]
        self.norm = torch.ones(self.hidden, dtype=torch.bfloat16, device="cuda")
        self.normed_heads = model.startswith("Qwen3")
        self.scale = torch.full((1,), 0.05, device="cuda")
        self.attention = DecodeAttention(self.heads, self.kv_heads, MOST_REQUESTS, self.norm.device)

    def batch(self, requests: int) -> DecodeBatch:
        """For `run`."""
        return DecodeBatch(requests, self.hidden, self.kv_heads, self.count)

    def run(self, batch: DecodeBatch, configs: TileConfigs, index: int) -> None:
        """The launches of one layer."""
        qkv, out, gate_up, down = self.weights[index]
        x, residual = self._norm(batch.x_MK, batch.residual_MK, configs[self.shapes[0]])
        attended = self._attend(batch, _multiply(x, qkv, configs), index)
        x, residual = self._norm(_multiply(attended, out, configs), residual, configs[self.shapes[2]])
        gated = gated_quantize(_multiply(x, gate_up, configs), "silu", "fp32")
        _multiply(gated, down, configs)

    def _norm(self, x_MK: Tensor, residual_MK: Tensor, config: TileConfig | None) -> tuple[Quantized, Tensor]:
        return rmsnorm_quantize(x_MK, residual_MK, self.norm, 1e-6, "fp32", small_m=config is not None)

    def _attend(self, batch: DecodeBatch, qkv_MN: Tensor, index: int) -> Quantized:
        norms = batch.norms if self.normed_heads else None
        query, key = norm_rope(
            *(qkv_MN, batch.positions_M, batch.cos_sin_PD, norms, self.scale, self.heads, self.kv_heads)
        )
        value = qkv_MN[:, -self.kv_heads * kernel_cases.HEAD_DIM :].view(key.shape)
        placed = batch.caches[index], batch.table_RB, batch.lengths_R, batch.slots_R
        step = DecodeStep(query, key, value, *placed, (self.scale,) * 3, kernel_cases.HEAD_DIM**-0.5)
        attended = empty(qkv_MN.shape[0], self.heads * kernel_cases.HEAD_DIM, qkv_MN.device)
        self.attention(step, attended)
        return attended


def _multiply(x: Quantized, weight: tuple[Tensor, Tensor], configs: TileConfigs) -> Tensor:
    codes, scales = weight
    config = configs[codes.shape[0], codes.shape[1]]
    if config is None:
        return DEEP_GEMM.run(x, codes, scales, torch.bfloat16)
    return decode_gemm(x, codes, scales, None, "fp32", config)


def _tried(
    layers: Layers, tokens: int, settled: TileConfigs, known: TileConfigs
) -> tuple[TileConfigs, list[float]]:
    """Return tile configs for the shapes that are not settled, and the layer's microseconds with what is the fastest alone,
    and with these. `known`: what to begin with."""
    calls = partial(layers.run, layers.batch(tokens))
    usual = {shape: settled[shape] if shape in settled else _alone(*shape, tokens) for shape in layers.shapes}
    before = usual | {
        shape: config for shape, config in known.items() if shape in usual and shape not in settled
    }
    fastest = dict(before)
    for _ in range(ROUNDS):
        for shape in [shape for shape in fastest if shape not in settled]:
            configs = list(dict.fromkeys([fastest[shape], *_fast(shape, tokens), None]))
            us = _us(
                layers,
                {str(config): partial(calls, fastest | {shape: config}) for config in configs},
                REPEATS,
            )
            fastest[shape] = min(configs, key=lambda config: us[str(config)])
    us = _us(layers, {str(configs): partial(calls, configs) for configs in (usual, before, fastest)})
    best = min((before, fastest), key=lambda configs: us[str(configs)])
    print(f"{us[str(usual)]:.2f} us, {us[str(best)]:.2f} as the layer wants it", flush=True)
    if us[str(best)] > us[str(usual)] * (1 - GAIN):
        best = usual
    times = [round(us[str(configs)], 2) for configs in (usual, best)]
    return {shape: config for shape, config in best.items() if shape not in settled}, times


def _us(
    layers: Layers, tries: dict[str, partial[None]], repeats: int = kernel_timing.REPEATS
) -> dict[str, float]:
    """Microseconds of each; infinite, where it fails."""
    timings = kernel_timing.measure(tries, dict.fromkeys(tries, layers.count), repeats)
    errors = [timing.error for timing in timings.values() if timing.error]
    if len(errors) == len(tries):
        raise SystemExit(f"nothing runs: {errors[0]}")
    return {name: math.inf if timing.error else timing.us for name, timing in timings.items()}


def _alone(n: int, k: int, tokens: int) -> TileConfig | None:
    """The fastest alone."""
    if not decode_gemm_configs.usable(tokens, n, k) or tokens > selection.crossover_alone(
        n, k, DEEP_GEMM.name
    ):
        return None
    return decode_gemm_configs.fastest_alone(n, k, tokens, quantized=True)


def _fast(shape: Shape, tokens: int) -> list[TileConfig]:
    """The decode GEMM's fastest alone."""
    n, k = shape
    known = decode_gemm_configs._measured(tokens, True, decode_gemm_configs.SPLITS[-1]).get(shape, {})
    every = decode_gemm_configs.tile_configs(n, k, tokens, quantized=True)
    return [config for config in every if decode_gemm_configs.config_key(config, tokens, k) in known]


if __name__ == "__main__":
    sys.exit(main())

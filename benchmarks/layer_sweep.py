# SPDX-License-Identifier: Apache-2.0
"""With which kernels and cuts a layer is the fastest on this GPU: DeepGEMM, or the decode GEMM with one of the cuts that are
the fastest alone (`kernel_sweep.py`), which also decide how early the launches behind it begin.

    python benchmarks/layer_sweep.py --models Qwen3-8B --table kernels/layer_cuts.json

The launches of a layer but attention, in a CUDA graph, over the weights of several layers: norm, QKV, quantization, output
projection, norm, gate and up, activation function, down. One GEMM is changed at a time, from what is the fastest alone
(`crossover.py`, which also compiles DeepGEMM's kernels, in several processes). Where two layers have weights of one shape, it
stays as the first one wants it: of the models here, in order, and before these of those that the table has of others. --table
is written after each number of tokens.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.bench.measured import Measured
from vllm_fp8ext.bench.projections import MODELS
from vllm_fp8ext.compat.gemm import deep_gemm
from vllm_fp8ext.kernels import bench, cases, decode_cuts, reference, selection
from vllm_fp8ext.kernels.decode_cuts import Config
from vllm_fp8ext.kernels.decode_gemm import decode_gemm
from vllm_fp8ext.kernels.gated_quantize import gated_quantize
from vllm_fp8ext.kernels.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.quantized import Quantized
from vllm_fp8ext.kernels.rmsnorm_quantize import rmsnorm_quantize

ROUNDS, REPEATS = 2, 5
GAIN = 0.003
"""Of a layer's time, for which other cuts are taken than those that are the fastest alone."""
Shape = tuple[int, int]
Cuts = dict[Shape, Config | None]
"""None: DeepGEMM."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-8B"])
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="tensor-parallel sizes")
    parser.add_argument(
        "--tokens", type=int, nargs="+", choices=decode_cuts.TOKENS, default=decode_cuts.TOKENS
    )
    parser.add_argument("--seconds", type=float, default=300, help="begin no layer after so long")
    parser.add_argument("--table", type=Path, required=True, help="put what is found into this file")
    options = parser.parse_args()
    chosen = [(model, parts) for parts in options.tp for model in options.models]
    start, table = time.monotonic(), Measured(options.table, ("n", "k", "tokens"))
    settled = _settled(table.cases, chosen)
    for model, parts in chosen:
        layers = Layers(model, parts)
        for tokens in options.tokens:
            if time.monotonic() - start > options.seconds:
                print(f"no time left for {model} of {parts} with {tokens} tokens")
                continue
            print(f"{model} of {parts}, {tokens} tokens: ", end="", flush=True)
            found, times = _tried(layers, tokens, settled.setdefault(tokens, {}))
            told = {"model": model, "tp": parts, "layer_us": times}
            for (n, k), cut in found.items():
                settled[tokens][n, k] = cut
                kind = cut and decode_cuts.kind(cut, tokens, k)
                table.put({"n": n, "k": k, "tokens": tokens, "cut": kind} | told)
    return 0


def _settled(known: list[dict[str, Any]], chosen: Sequence[tuple[str, int]]) -> dict[int, Cuts]:
    """By tokens, the cuts that a table has of layers that are not chosen."""
    found: dict[int, Cuts] = {}
    for case in known:
        n, k, tokens, kind = case["n"], case["k"], case["tokens"], case["cut"]
        cut = kind and decode_cuts.of_kind(n, k, tokens, tuple(kind), quantized=True)
        if bool(cut) == bool(kind) and (case["model"], case["tp"]) not in chosen:
            found.setdefault(tokens, {})[n, k] = cut
    return found


class Layers:
    """Weights of some layers of one of `parts` ranks, more than the L2 cache holds."""

    def __init__(self, model: str, parts: int) -> None:
        hidden, intermediate, q, kv = MODELS[model]
        self.q = q // parts
        self.shapes = (
            ((q + 2 * kv) // parts, hidden),
            (hidden, q // parts),
            (2 * intermediate // parts, hidden),
            (hidden, intermediate // parts),
        )
        made = [reference.quantize_weight(cases.weight(*shape, "cuda")) for shape in self.shapes]
        self.count = bench.copies(sum(codes.numel() for codes, _ in made))
        self.weights = [[(codes.clone(), scales) for codes, scales in made] for _ in range(self.count)]
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")

    def run(self, x_MK: Tensor, residual_MK: Tensor, cuts: Cuts, index: int) -> None:
        """The launches of one layer."""
        qkv, out, gate_up, down = self.weights[index]
        x, residual = rmsnorm_quantize(x_MK, residual_MK, self.norm, 1e-6, "fp32")
        attended = quantize_activation(_multiply(x, qkv, cuts)[:, : self.q], "fp32")
        x, residual = rmsnorm_quantize(_multiply(attended, out, cuts), residual, self.norm, 1e-6, "fp32")
        gated = gated_quantize(_multiply(x, gate_up, cuts), "silu", "fp32")
        _multiply(gated, down, cuts)


def _multiply(x: Quantized, weight: tuple[Tensor, Tensor], cuts: Cuts) -> Tensor:
    codes, scales = weight
    cut = cuts.get((codes.shape[0], codes.shape[1]))
    if cut is None:
        return deep_gemm(x, codes, scales, torch.bfloat16)
    return decode_gemm(x, codes, scales, None, "fp32", cut)


def _tried(layers: Layers, tokens: int, settled: Cuts) -> tuple[Cuts, list[float]]:
    """Cuts for the shapes that are not settled, and the layer's microseconds with what is the fastest alone in their place,
    and with these."""
    x, residual = (cases.activations(tokens, layers.shapes[0][1], "cuda", seed) for seed in (0, 1))
    calls = partial(layers.run, x, residual)
    usual = {shape: settled[shape] if shape in settled else _alone(*shape, tokens) for shape in layers.shapes}
    found = dict(usual)
    for _ in range(ROUNDS):
        for shape in [shape for shape in found if shape not in settled]:
            cuts = [*_known(shape, tokens), None]
            tries = {str(cut): partial(calls, found | {shape: cut}) for cut in cuts}
            timings = bench.measure(tries, dict.fromkeys(tries, layers.count), REPEATS)
            times = {cut: timings[str(cut)].us for cut in cuts if not timings[str(cut)].error}
            found[shape] = min(times, key=lambda cut: times[cut], default=found[shape])
    timings = bench.measure(
        {"usual": partial(calls, usual), "found": partial(calls, found)},
        dict.fromkeys(("usual", "found"), layers.count),
    )
    before, after = (round(timings[name].us, 2) for name in ("usual", "found"))
    print(f"{before:.2f} us, {after:.2f} as the layer wants it", flush=True)
    if after > before * (1 - GAIN):
        found, after = usual, before
    return {shape: cut for shape, cut in found.items() if shape not in settled}, [before, after]


def _alone(n: int, k: int, tokens: int) -> Config | None:
    """The fastest alone."""
    if not decode_cuts.usable(tokens, n, k) or tokens > selection.crossover_alone(n, k, "deep_gemm"):
        return None
    return decode_cuts.fastest_alone(n, k, tokens, quantized=True)


def _known(shape: Shape, tokens: int) -> list[Config]:
    """The decode GEMM's fastest alone."""
    n, k = shape
    known = decode_cuts._measured(tokens, True, decode_cuts.SPLITS[-1]).get(shape, {})
    every = decode_cuts.cuts(n, k, tokens, quantized=True)
    return [cut for cut in every if decode_cuts.kind(cut, tokens, k) in known]


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What a layer's linear part costs beside its GEMMs: its launches one after the other, as a decode step has them.

    python benchmarks/layer_chain.py --model Qwen3-8B --tokens 8 32 64

In a CUDA graph, over the weights of several layers: norm, QKV, quantization, output projection, norm, gate and up, activation
function, down. `gemms`: the four GEMMs alone, of activations that are quantized already. Microseconds of one layer. In turn,
with so many percent of a multiprocessor's memory as shared memory while one of the other launches runs (`--carveouts`; -1: as
the driver likes; of GEMMs 100), and with so many KiB of it that GEMMs leave free (`--rooms`).
"""

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_fp8ext.bench.projections import MODELS
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.kernels import (
    bench,
    cases,
    cuda,
    gated_quantize,
    quantize_activation,
    reference,
    rmsnorm_quantize,
)
from vllm_fp8ext.kernels.decode_cuts import Config
from vllm_fp8ext.kernels.decode_gemm import decode_gemm
from vllm_fp8ext.kernels.quantized import Quantized

FEWEST_LAYERS = 2
ROUNDS = 3


class Layers:
    """Weights of some layers, more than the L2 cache holds, and what their GEMMs are given."""

    def __init__(self, model: str, tokens: int) -> None:
        hidden, intermediate, q, kv = MODELS[model]
        self._q, shapes = (
            q,
            [(q + 2 * kv, hidden), (hidden, q), (2 * intermediate, hidden), (hidden, intermediate)],
        )
        made = [reference.quantize_weight(cases.weight(*shape, "cuda")) for shape in shapes]
        count = max(FEWEST_LAYERS, bench.copies(sum(codes.numel() for codes, _ in made)))
        self.layers = [[(codes.clone(), scales) for codes, scales in made] for _ in range(count)]
        self._norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
        self._x, self._residual = (cases.activations(tokens, hidden, "cuda", seed) for seed in (0, 1))
        self._inputs = [
            quantize_activation.quantize_activation(cases.activations(tokens, k, "cuda"), "fp32")
            for _, k in shapes
        ]

    def gemms(self, index: int) -> None:
        for x, weight in zip(self._inputs, self.layers[index], strict=True):
            _multiply(x, weight)

    def layer(self, index: int) -> None:
        qkv, out, gate_up, down = self.layers[index]
        x, residual = rmsnorm_quantize.rmsnorm_quantize(self._x, self._residual, self._norm, 1e-6, "fp32")
        attended = _multiply(x, qkv)[:, : self._q]
        attended = _multiply(quantize_activation.quantize_activation(attended, "fp32"), out)
        x, residual = rmsnorm_quantize.rmsnorm_quantize(attended, residual, self._norm, 1e-6, "fp32")
        _multiply(gated_quantize.gated_quantize(_multiply(x, gate_up), "silu", "fp32"), down)


def _multiply(x: Quantized, weight: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return decode_gemm(x, *weight, None, "fp32")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="Qwen3-8B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--carveouts", type=int, nargs="+", default=[-1])
    parser.add_argument("--rooms", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for tokens in options.tokens:
        layers, samples = Layers(options.model, tokens), {}
        for _ in range(ROUNDS):
            for room in options.rooms:
                for carveout in options.carveouts:
                    for name, call in (("gemms", layers.gemms), ("layer", layers.layer)):
                        key = name, carveout, room
                        samples.setdefault(key, []).extend(_samples(call, len(layers.layers), carveout, room))
        for (name, carveout, room), values in samples.items():
            us = statistics.median(values)
            print(
                f"{options.model} {tokens:3} tokens, carveout {carveout:3}, {room:2} KiB free: {name} {us:7.2f} us",
                flush=True,
            )
            found.append(
                {
                    "model": options.model,
                    "m": tokens,
                    "variant": name,
                    "carveout": carveout,
                    "room_kib": room,
                    "us": us,
                }
                | {"samples": values}
            )
        write_cases(options.out, provenance(), found)
    return 0


def _samples(call: Callable[[int], None], layers: int, carveout: int, room: int) -> tuple[float, ...]:
    usual = Config.ring.__defaults__
    Config.ring.__defaults__ = (cuda.MOST_SHARED_BYTES - room * 1024,)
    try:
        call(0)
        for module in (gated_quantize, quantize_activation, rmsnorm_quantize):
            for kernel in module._launch._kernels.values():
                cuda.set_carveout(ctypes.c_void_p(kernel.function), carveout)
        return bench.measure({"it": call}, {"it": layers}, 3)["it"].samples
    finally:
        Config.ring.__defaults__ = usual


if __name__ == "__main__":
    sys.exit(main())

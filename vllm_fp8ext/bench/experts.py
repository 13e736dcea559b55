# SPDX-License-Identifier: Apache-2.0
"""Experts of Qwen3-30B-A3B against each other: our kernels, vLLM's with their block scales (`stock`) and in BF16.

One layer is larger than the L2 cache several times, and tokens go to other experts in each call. Several processes compile
what is timed, which takes one of them minutes.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.bench.report import Calls, Report
from vllm_fp8ext.environment import cores
from vllm_fp8ext.kernels.moe.expert_configs import TILE_CONFIGS, ExpertChoice, ExpertTileConfig
from vllm_fp8ext.kernels.moe.expert_error import experts_error
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat
from vllm_fp8ext.kernels.quantize.quantize_weight import empty_like, quantize_weight
from vllm_fp8ext.kernels.testing import kernel_cases, kernel_timing
from vllm_fp8ext.layers import expert_gemm
from vllm_fp8ext.layers.expert_gemm import ExpertWeights
from vllm_fp8ext.layers.expert_kernels import EXPERT_KERNELS, FUSED_EXPERTS

(EXPERTS, WIDTH, HIDDEN), CHOSEN = kernel_cases.EXPERTS, 8
ROUTINGS = 4
"""Routings of one case."""
CHECKED = 128
"""Tokens of a case whose result is compared with the reference."""
_PROCESSES = 14
"""Processes that compile at the same time."""
_SECONDS = 240
"""For all of them."""
_FUSED = 512
"""Most tokens of our kernel for few."""

TRIED = (
    *(config for _, config in TILE_CONFIGS),
    ExpertTileConfig(alone=True),
    ExpertTileConfig(alone=True, ahead=4),
    ExpertTileConfig(alone=True, down_rows=128, stages=3, ahead=2),
    ExpertTileConfig(alone=True, down_rows=128, stages=3, ahead=8),
    ExpertTileConfig(down_rows=128, stages=3, ahead=2),
    ExpertTileConfig(down_rows=128, stages=3, ahead=4),
    ExpertTileConfig(rows=128, down_rows=64, stages=3, ahead=2),
    ExpertTileConfig(rows=128, down_rows=128, stages=3),
    ExpertTileConfig(rows=128, down_rows=128, stages=3, ahead=2),
    ExpertTileConfig(rows=128, down_rows=128, stages=3, warps=8),
    ExpertTileConfig(tokens=32, down_rows=128, stages=3),
    ExpertTileConfig(tokens=32, down_rows=128, stages=3, ahead=2),
    ExpertTileConfig(tokens=32, rows=128, down_rows=128, stages=3),
    ExpertTileConfig(tokens=64, stages=3),
    ExpertTileConfig(tokens=64, stages=3, ahead=4),
    ExpertTileConfig(tokens=64),
    ExpertTileConfig(tokens=64, rows=128, stages=3, warps=8),
    ExpertTileConfig(tokens=64, rows=128, down_rows=128, stages=3, warps=8, ahead=2),
)
"""Tile configs that are timed."""


class Layer:
    """Weights, quantized and in BF16."""

    def __init__(self) -> None:
        shapes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
        self.weights = [_weights(index, *shape) for index, shape in enumerate(shapes)]
        parts = []
        for weight in self.weights:
            codes, scales = empty_like(weight.flatten(0, 1))
            quantize_weight(weight.flatten(0, 1), codes, scales, "fp32")
            parts += [codes.view(weight.shape), scales.view(EXPERTS, -1, scales.shape[1])]
        self.quantized = ExpertWeights(*parts)

    def moved(self, m: int, routings: Sequence[tuple[Tensor, Tensor]], element: int) -> int:
        """Fewest bytes of a call: the weights of all experts that have a token, and activations."""
        active = sum(len(of.unique()) for _, of in routings) / len(routings)
        return int(active * 3 * WIDTH * HIDDEN * element) + 4 * m * HIDDEN


def _weights(seed: int, rows: int, columns: int) -> Tensor:
    noise = torch.Generator("cuda").manual_seed(seed)
    shape = EXPERTS, rows, columns
    values = torch.randn(shape, generator=noise, device="cuda", dtype=torch.bfloat16) * 0.02
    values[:, :, ::97] *= 10
    return values


def _calls(layer: Layer, m: int, names: Sequence[str] | None = None) -> tuple[Calls, list[Any], Tensor]:
    """Return the calls to time, the routings and the tokens."""
    x = kernel_cases.activations(m, HIDDEN, "cuda")
    routings = [kernel_cases.routing(m, EXPERTS, CHOSEN, "cuda", seed) for seed in range(ROUTINGS)]
    choices = {
        f"blockfp8_{name}": ExpertChoice(name, None) for name in EXPERT_KERNELS if name != FUSED_EXPERTS.name
    }
    if m <= _FUSED:
        load = m * CHOSEN / EXPERTS
        choices |= {
            f"blockfp8_{config.name}": ExpertChoice(FUSED_EXPERTS.name, config)
            for config in TRIED
            if (load <= 0.5 or not config.alone)
            and (load > 2 or config.tokens == 16)
            and (load > 8 or config.tokens < 64)
        }

    def ours(choice: ExpertChoice, i: int) -> Tensor:
        return expert_gemm.compute(choice, x, layer.quantized, *routings[i], "silu", "fp32")

    calls: Calls = {"bf16": partial(_vllm, layer, x, routings, None)}
    calls["stock"] = partial(_vllm, layer, x, routings, _config(layer))
    calls |= {name: partial(ours, choice) for name, choice in choices.items()}
    return {name: c for name, c in calls.items() if names is None or name in names}, routings, x


def _config(layer: Layer) -> Any:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    scales = layer.quantized.gate_up_scales, layer.quantized.down_scales
    return fp8_w8a8_moe_quant_config(w1_scale=scales[0], w2_scale=scales[1], block_shape=[BLOCK, BLOCK])


def _vllm(layer: Layer, x: Tensor, routings: list[tuple[Tensor, Tensor]], config: Any, i: int) -> Tensor:
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    parts = layer.weights if config is None else [layer.quantized.gate_up, layer.quantized.down]
    out: Tensor = fused_experts(x, parts[0], parts[1], *routings[i], quant_config=config)
    return out


def experts(report: Report, tokens: Sequence[int]) -> None:
    """Times all of them; the last lines are a table."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

    get_moe_configs(EXPERTS, WIDTH, None)  # says once where it is found
    _compile(report, tokens)
    layer = Layer()
    lines = []
    for m in tokens:
        if report.late(f"experts m={m}"):
            break
        calls, routings, x = _calls(layer, m)
        exact = {name: _right(layer, routings, x, call, name) for name, call in calls.items()}
        moved = {name: layer.moved(m, routings, 2 if name == "bf16" else 1) for name in calls}
        timings = kernel_timing.measure(calls, dict.fromkeys(calls, ROUTINGS), repeats=5)
        shape = EXPERTS, 2 * WIDTH, HIDDEN
        operations = 6 * m * CHOSEN * WIDTH * HIDDEN
        report.add("experts", shape, m, timings, moved, exact=exact, operations=operations)
        lines.append(_line(m, timings))
    report.say(
        f"{'tokens':>6} {'bf16':>8} {'stock':>8} {'triton':>8} {'deep':>8} {'fused':>8} us, the best tile config"
    )
    for line in lines:
        report.say(line)


def _line(m: int, timings: dict[str, kernel_timing.Timing]) -> str:
    us = {name: timing.us for name, timing in timings.items() if timing.samples}
    fused = {name: value for name, value in us.items() if "/" in name}
    best = min(fused, key=fused.__getitem__, default="-")
    columns = [
        us.get(name, float("nan")) for name in ("bf16", "stock", "blockfp8_triton", "blockfp8_deep_gemm")
    ]
    columns.append(fused.get(best, float("nan")))
    return f"{m:6} " + " ".join(f"{value:8.1f}" for value in columns) + f" {best.removeprefix('blockfp8_')}"


def _right(layer: Layer, routings: list[tuple[Tensor, Tensor]], x: Tensor, call: Any, name: str) -> bool:
    """Compare the first tokens' results with the reference, and with a second call. vLLM gives activations
    scales that are powers of two wherever DeepGEMM runs, also where it does not multiply."""
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    try:
        out, again = call(0), call(0)
    except Exception:  # comes again when it is timed, where it is recorded
        return False
    if name == "bf16":
        return True
    checked, weights, of = (part[:CHECKED] for part in (x, *routings[0]))
    form: ScaleFormat = "pow2" if name == "stock" and is_deep_gemm_e8m0_used() else "fp32"
    same = torch.equal(out, again) or not name.startswith("blockfp8")
    return same and experts_error(out[:CHECKED], checked, *layer.quantized, weights, of, "silu", form) < 1


def _compile(report: Report, tokens: Sequence[int]) -> None:
    """Run everything once in parallel processes, which fill the caches of Triton and DeepGEMM."""
    layered: dict[str, list[int]] = {"bf16": list(tokens), "stock": list(tokens)}
    layered |= {"blockfp8_triton": list(tokens), "blockfp8_deep_gemm": list(tokens)}
    tasks = [(name, m) for name, counts in layered.items() for m in counts]
    for config in TRIED:
        m = 4 if config.alone else 256
        tasks.append((f"blockfp8_{config.name}", m))
    count = min(_PROCESSES, cores())
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(tasks[start::count])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for start in range(count)
    ]
    stop = time.monotonic() + _SECONDS
    for process in started:
        try:
            _, errors = process.communicate(timeout=max(stop - time.monotonic(), 1))
            if process.returncode:
                report.say(f"compiling ahead: {errors.decode(errors='replace')[-300:]}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            report.say(f"compiling ahead: not done after {_SECONDS} s")


def main(tasks: list[tuple[str, int]]) -> None:
    """Call each once; what fails is recorded where it is timed."""
    layer = Layer()
    for name, m in tasks:
        for call in _calls(layer, m, [name])[0].values():
            try:
                call(0)
            except Exception as error:
                print(name, m, error, file=sys.stderr)
    torch.cuda.synchronize()


if __name__ == "__main__":
    with torch.inference_mode():
        main([(name, m) for name, m in json.loads(sys.argv[1])])

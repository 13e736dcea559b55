# SPDX-License-Identifier: Apache-2.0
"""Peak memory and tokens/s of training with COAT's parts, of Llama-2-7B's shape with random weights.

    python benchmarks/coat.py --out benchmarks/results/coat_h200.json

Variants: `bf16` (BF16 weights and AdamW), `optimizer` (`Fp8AdamW`), `activations` (`Fp8Activations`), `both`. Each is a
process of its own, one after another, in so many rounds.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.trainer.activations import Fp8Activations
from vllm_fp8ext.trainer.optimizer import Fp8AdamW

VARIANTS = ("bf16", "optimizer", "activations", "both")


def measure(model: nn.Module, vocabulary: int, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train on random tokens: peak memory in bytes (0 on a CPU), bytes of optimizer states, tokens/s of each step."""
    device = next(model.parameters()).device
    optimizer: torch.optim.Optimizer
    if variant in ("optimizer", "both"):
        optimizer = Fp8AdamW(model.parameters(), lr=1e-5)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rates = []
    for _ in range(options.steps):
        tokens = torch.randint(vocabulary, (options.batch, options.tokens), device=device)
        _wait(device)
        start = time.perf_counter()
        fp8 = variant in ("activations", "both")
        with Fp8Activations(model) if fp8 else contextlib.nullcontext():
            logits = model(tokens)
        logits = getattr(logits, "logits", logits)
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        rates.append(tokens.numel() / (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    state = sum(
        value.nbytes for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)
    )
    return {"variant": variant, "peak_memory": peak, "state_bytes": state, "samples": rates[options.warmup :]}


def summary(runs: list[dict[str, Any]], parameters: int) -> list[dict[str, Any]]:
    """Return a case for each variant: medians over rounds, and ratios to BF16's; `state_ratio` is to FP32 states."""
    cases = []
    base = [run["peak_memory"] for run in runs if run["variant"] == "bf16"]
    for variant in dict.fromkeys(run["variant"] for run in runs):
        chosen = [run for run in runs if run["variant"] == variant]
        peak = statistics.median(run["peak_memory"] for run in chosen)
        samples = [sample for run in chosen for sample in run["samples"]]
        cases.append(
            {
                "variant": variant,
                "peak_memory": peak,
                "peak_memory_ratio": statistics.median(base) / peak if base and peak else None,
                "state_ratio": 8 * parameters / chosen[0]["state_bytes"],
                "tokens_per_s": statistics.median(samples),
                "samples": samples,
            }
        )
    return cases


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _run(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=options.layers, use_cache=False)  # the defaults are Llama-2-7B's
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = LlamaForCausalLM(config)
    count = sum(each.numel() for each in model.parameters())
    return {**measure(model, config.vocab_size, variant, options), "parameters": count}


def main() -> int:
    """Measure each variant in a process, print, and write the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--alone", action="store_true", help="measure the one variant here, and print JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(_run(options.variants[0], options)))
        return 0
    names = ("layers", "batch", "tokens", "steps", "warmup", "device")
    shared = [f"--{name}={getattr(options, name)}" for name in names]
    runs = []
    for _ in range(options.rounds):
        for variant in options.variants:
            line = [sys.executable, __file__, "--alone", "--variants", variant, *shared]
            done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            print(variant, {key: value for key, value in runs[-1].items() if key != "samples"}, flush=True)
    cases = summary(runs, runs[0]["parameters"])
    setting = {name: getattr(options, name) for name in names}
    write_cases(options.out, provenance(), [{**setting, **case} for case in cases])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

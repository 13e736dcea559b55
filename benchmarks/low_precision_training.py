# SPDX-License-Identifier: Apache-2.0
"""Train the tiny addition model with each low-precision method of the trainer kit, and record losses.

    python benchmarks/low_precision_training.py --variants bf16 fp4 fp4_dge fp4_dge_occ --out benchmarks/results/fp4_cpu.json
    python benchmarks/low_precision_training.py --variants bf16 coat_optimizer coat_activations coat --out coat_cpu.json

All variants of a seed begin with the same weights and see the same batches. `bf16` computes under autocast with FP32 master
weights. Its moments at the end give the quantization errors of `moments`: with range expansion and without.
"""

import argparse
import contextlib
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.trainer.activations import Fp8Activations
from vllm_fp8ext.trainer.convert import Recipe, convert
from vllm_fp8ext.trainer.fp4 import Fp4Recipe
from vllm_fp8ext.trainer.group_moments import moment_values, quantize_moments
from vllm_fp8ext.trainer.optimizer import Fp8AdamW
from vllm_fp8ext.trainer.recipes import BlockScaling, CurrentScaling, DelayedScaling, Fp8Name

RECIPES: dict[str, Recipe] = {
    "fp8_block": BlockScaling(),
    "fp8_block_bf16_backward": BlockScaling(backward="bf16"),
    "fp8_delayed": DelayedScaling(),
    "fp8_current": CurrentScaling(),
    "fp4": Fp4Recipe(estimator=None, quantile=None),
    "fp4_dge": Fp4Recipe(quantile=None),
    "fp4_dge_occ": Fp4Recipe(),
}
"""Recipes of variants that convert layers."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "coat_optimizer": {},
    "coat_optimizer_e5m2": {"formats": ("e4m3", "e5m2")},
    "coat_optimizer_plain": {"expand": False},
    "coat": {},
}
"""Settings of `Fp8AdamW` in variants that take it."""
IN_FP8 = ("coat_activations", "coat")
"""Variants whose activations are FP8."""
VARIANTS = ("bf16", *RECIPES, *OPTIMIZERS, "coat_activations")
SAMPLE = 1 << 14
"""Values of each parameter's moments, the first ones, whose errors are measured."""
TAIL = 0.05
"""Share of the steps, the last ones, whose mean is a run's loss."""

FORMATS: tuple[Fp8Name, ...] = ("e4m3", "e5m2")


def train(
    model: nn.Module,
    logits: Callable[[nn.Module, Tensor], Tensor],
    batches: Iterator[Tensor],
    variant: str,
    steps: int,
    rate: float = 2e-3,
) -> tuple[list[float], torch.optim.Optimizer]:
    """Train `model` in place for so many steps: the loss of each, and the optimizer.

    `logits`: of a batch of tokens `[batch, tokens]`, the model's `[batch, tokens - 1, vocabulary]` for all but the first.
    """
    if variant in RECIPES:
        convert(model, RECIPES[variant])
    settings = {"lr": rate, "betas": (0.9, 0.98), "weight_decay": 0.1}
    optimizer: torch.optim.Optimizer
    if variant in OPTIMIZERS:
        optimizer = Fp8AdamW(model.parameters(), **settings, **OPTIMIZERS[variant])
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    warmup = max(1, steps // 15)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    losses = []
    for _ in range(steps):
        batch = next(batches)
        saved = Fp8Activations(model) if variant in IN_FP8 else contextlib.nullcontext()
        with torch.autocast(batch.device.type, torch.bfloat16), saved:
            out = logits(model, batch)
        loss = nn.functional.cross_entropy(out.float().transpose(1, 2), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, optimizer


def moment_errors(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Mean squared errors of quantized moments, and of the update `m / (sqrt(v) + 1e-8)`, by formats and expansion."""
    states = [state for state in optimizer.state.values() if state["exp_avg"].numel() >= 1024]
    rows = []
    for formats in itertools.product(FORMATS, repeat=2):
        for expand in (False, True):
            errors: dict[str, list[Tensor]] = {"first": [], "second": [], "update": []}
            for state in states:
                exact = tuple(state[name].flatten()[:SAMPLE].float() for name in ("exp_avg", "exp_avg_sq"))
                rounded = [
                    moment_values(quantize_moments(each, form, expand=expand))
                    for each, form in zip(exact, formats, strict=True)
                ]
                updates = [m / (v.sqrt() + 1e-8) for m, v in (exact, rounded)]
                for name, (one, other) in zip(
                    errors, (*zip(exact, rounded, strict=True), updates), strict=True
                ):
                    errors[name].append((one - other).square().flatten())
            means = {name: torch.cat(parts).mean().item() for name, parts in errors.items()}
            rows.append(
                {"formats": list(formats), "expand": expand, **{f"mse_{k}": v for k, v in means.items()}}
            )
    return rows


def tiny() -> ModuleType:
    """Return the module of `examples/tiny/train.py`, which makes the model and its data."""
    path = Path(__file__).parents[1] / "examples" / "tiny" / "train.py"
    spec = importlib.util.spec_from_file_location("tiny_train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Train, print, and write the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["bf16", "fp8_block"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    module, cases, moments = tiny(), [], []
    rows = module.training_rows()
    for seed in options.seeds:
        for variant in options.variants:
            torch.manual_seed(seed)
            model = module.build_model().to(options.device)
            noise = torch.Generator().manual_seed(seed)

            def batches(noise: torch.Generator = noise) -> Iterator[Tensor]:
                while True:
                    chosen = torch.randint(len(rows), (options.batch,), generator=noise)
                    yield rows[chosen].long().to(options.device)

            start = time.monotonic()
            losses, optimizer = train(
                model,
                lambda model, x: model(x[:, :-1], use_cache=False).logits,
                batches(),
                variant,
                options.steps,
            )
            tail = statistics.mean(losses[-max(1, int(TAIL * options.steps)) :])
            seconds = time.monotonic() - start
            print(f"{variant:24} seed {seed}: loss {tail:.5f}, {seconds:.0f} s", flush=True)
            if variant == "bf16":
                moments += [{"seed": seed, **row} for row in moment_errors(optimizer)]
            every = losses[:: max(1, options.steps // 200)]
            cases.append(
                {"variant": variant, "seed": seed, "loss": tail, "losses": every, "seconds": seconds}
            )
            write_cases(options.out, provenance(), cases, moments=moments, steps=options.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

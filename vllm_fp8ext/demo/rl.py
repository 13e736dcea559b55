# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning through a real server: rollouts in BF16 and in FP8, corrected and not, beside each other.

The tiny model begins near `EARLY`, and learns to add by GRPO. Each step asks the server for groups of answers, trains, and
pushes the weights. A run that is in the file already is not repeated.
"""

import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vllm_fp8ext.checkpoints import DIGITS, EARLY, AdditionProblem, held_out, problems
from vllm_fp8ext.demo.grpo import Policy, SampledBatch
from vllm_fp8ext.demo.off_grid import write_start
from vllm_fp8ext.demo.server import MODEL, SMALL, Server
from vllm_fp8ext.demo.traffic import accuracy, answers
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.trainer.correction import Correction
from vllm_fp8ext.trainer.kv_cache import Fp8KvAttention
from vllm_fp8ext.trainer.mismatch import measure
from vllm_fp8ext.trainer.recipes import BlockScaling


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Numerics of the server and of the trainer, and the correction of the loss."""

    quantized: bool = True
    """The server computes in FP8."""
    kv_cache: bool = False
    """It has an FP8 KV cache, too."""
    end_to_end: bool = False
    """The trainer computes as the server does, over the same K and V."""
    correction: Correction | None = None


TIS = Correction()
VARIANTS = {
    "bf16": Variant(quantized=False),
    "fp8": Variant(),
    "fp8_tis": Variant(correction=TIS),
    "fp8_end_to_end": Variant(end_to_end=True),
    "fp8_end_to_end_tis": Variant(end_to_end=True, correction=TIS),
    "fp8_kv": Variant(kv_cache=True),
    "fp8_kv_tis": Variant(kv_cache=True, correction=TIS),
    "fp8_kv_end_to_end_tis": Variant(kv_cache=True, end_to_end=True, correction=TIS),
}
"""All variants; those of one server follow each other."""
SERVERS = {"bf16": (False, False), "fp8": (True, False), "fp8_kv": (True, True)}
"""Servers by name, one after another: what is quantized, `Variant.quantized` and `Variant.kv_cache`."""
CURVES = ("reward", "mismatch_kl", "ess", "entropy")
"""Names of lists in a case that have a value for each step."""
MAX_TOKENS = 8
HELD_OUT = 300
LATER = 0.25
"""Share of the steps, the last ones, whose mean stands for a run."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How each run trains.

    Attributes:
        steps: how many rollouts.
        prompts: problems of a rollout.
        group: answers to each.
        updates: optimizer steps on each rollout.
        rate: the optimizer's learning rate.
        on_grid: begin at `EARLY` itself, and serve it with scales that are powers of two. Its weights are codes then, which
            short steps do not change: the harder case (`off_grid`).
    """

    steps: int = 120
    prompts: int = 16
    group: int = 8
    updates: int = 1
    rate: float = 1e-4
    on_grid: bool = False

    @property
    def scale_format(self) -> ScaleFormat:
        """Format of scales of the server and of the trainer's layers."""
        return "pow2" if self.on_grid else "fp32"


def run(
    variants: Sequence[str],
    seeds: Sequence[int],
    plan: Plan,
    *,
    origin: dict[str, Any],
    out: Path | None = None,
    html: Path | None = None,
) -> int:
    """Train each variant from each seed, and show what came of it; 0 once all have ended.

    Args:
        origin: provenance of what this call trains.
        out: results as JSON: read, if it is there, and written after each run.
        html: a page with the curves.

    Raises:
        RuntimeError: a server did not start.
        UpdateError: a push was refused.
    """
    if html is not None:  # plotly is of another extra: a lack of it is told before hours of training
        from vllm_fp8ext.demo.rl_page import page
    torch.set_num_threads(1)  # more wait for each other where others use the cores, and sum in another order
    console = Console()
    results = _read(out)
    cases = results["cases"]
    wanted = [(name, seed) for name in variants for seed in seeds]
    missing = [key for key in wanted if not any(_same(case, key, plan) for case in cases)]
    with (
        Progress(console=console, transient=True) as bar,
        tempfile.TemporaryDirectory(prefix="fp8ext-rl-") as folder,
    ):
        start = EARLY if plan.on_grid else write_start(Path(folder) / "start")
        for served in SERVERS:
            runs = [key for key in missing if _served(VARIANTS[key[0]]) == served]
            if runs:
                with _server(start, served, plan, Path(folder)) as server:
                    server.wait()
                    for name, seed in runs:
                        task = bar.add_task(f"{name}, seed {seed}", total=plan.steps)
                        case = _train(server, start, name, seed, plan, partial(bar.advance, task))
                        if origin not in results["runs"]:
                            results["runs"].append(origin)
                        cases.append({**case, "run": len(results["runs"]) - 1})
                        _write(out, results)
                        console.print(
                            f"{name}, seed {seed}: {case['accuracy']:.1%} after {case['seconds']:.0f} s"
                        )
    shown = [case for case in cases if any(_same(case, key, plan) for key in wanted)]
    console.print(_table(shown))
    if html is not None:
        html.write_text(page(shown), encoding="utf-8")
    return 0


def _served(variant: Variant) -> str:
    return next(name for name, of in SERVERS.items() if of == (variant.quantized, variant.kv_cache))


def _server(start: Path, name: str, plan: Plan, logs: Path) -> Server:
    quantized, kv_cache = SERVERS[name]
    # BF16 by the same server, all layers kept: it takes the same pushes
    settings: dict[str, Any] = {"scale_format": plan.scale_format} if quantized else {"ignore": ["*"]}
    if kv_cache:
        settings["kv_scales"] = "calibrate"
    kv = ("--kv-cache-dtype", "fp8") if kv_cache else ()
    arguments = (*SMALL, "--logprobs-mode", "processed_logprobs", *kv)
    return Server(start, logs / f"{name}.log", arguments=arguments, settings=settings)


def _train(
    server: Server, start: Path, name: str, seed: int, plan: Plan, advance: Callable[[], None]
) -> dict[str, Any]:
    """One run: a case with the curves, the accuracy on held-out problems, and the median seconds of a step's parts."""
    variant, began = VARIANTS[name], time.monotonic()
    torch.manual_seed(seed)
    kv = Fp8KvAttention(sdpa_attention_forward) if variant.kv_cache and variant.end_to_end else None
    recipe = BlockScaling(scale_format=plan.scale_format) if variant.end_to_end else None
    policy = Policy(start, rate=plan.rate, recipe=recipe, kv_attention=kv)
    curves: dict[str, list[float]] = {curve: [] for curve in CURVES}
    seconds: dict[str, list[float]] = {"rollout": [], "train": [], "push": []}
    generator = random.Random(seed)
    with server.client() as client:
        client.push(start, version="start")
        for step in range(plan.steps):
            with _timed(seconds["rollout"]):
                rollout = asyncio.run(
                    _sample(server, _training(generator, plan.prompts), plan.group, f"{seed}.{step}")
                )
            if kv is not None:
                kv.use(client.kv_scales().scales)
            with _timed(seconds["train"]):
                _step(policy, rollout, plan, variant, curves)
            with _timed(seconds["push"]):
                client.push(policy.tensors(), version=f"step-{step + 1}")
            advance()
    held = problems(HELD_OUT)
    return {
        "variant": name,
        "seed": seed,
        "plan": asdict(plan),
        **curves,
        "accuracy": accuracy(answers(server.url, held), held),
        "step_seconds": {part: statistics.median(values) for part, values in seconds.items()},
        "seconds": time.monotonic() - began,
    }


def _step(
    policy: Policy, rollout: SampledBatch, plan: Plan, variant: Variant, curves: dict[str, list[float]]
) -> None:
    before, entropy = policy.update(rollout, correction=variant.correction)
    for _ in range(plan.updates - 1):
        policy.update(rollout, before, variant.correction)
    mismatch = measure(before, rollout.server_logprobs, rollout.mask)
    curves["reward"].append(rollout.rewards.mean().item())
    curves["mismatch_kl"].append(mismatch.kl_k3)
    curves["ess"].append(mismatch.effective_sample_size)
    curves["entropy"].append((entropy * rollout.mask).sum().item() / rollout.mask.sum().item())


def _training(generator: random.Random, count: int) -> list[AdditionProblem]:
    """Problems that are not held out."""
    chosen: list[AdditionProblem] = []
    while len(chosen) < count:
        a, b = (generator.randrange(10**DIGITS) for _ in range(2))
        if not held_out(a, b):
            chosen.append(AdditionProblem(a, b))
    return chosen


async def _sample(server: Server, asked: Sequence[AdditionProblem], group: int, seed: str) -> SampledBatch:
    """Ask for `group` answers to each problem, at temperature 1 with logprobs, as trainers do. A right one's reward is 1."""

    async def ask(client: AsyncOpenAI, number: int, problem: AdditionProblem) -> Any:
        return await client.completions.create(
            model=MODEL,
            prompt=problem.prompt,
            n=group,
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            logprobs=0,
            seed=random.Random(f"{seed}.{number}").randrange(2**31),
            extra_body={"return_token_ids": True},
        )

    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        replies = await asyncio.gather(
            *(ask(client, number, problem) for number, problem in enumerate(asked))
        )
    tokens: list[list[int]] = []
    logprobs: list[list[float]] = []
    rewards: list[float] = []
    for problem, reply in zip(asked, replies, strict=True):
        for choice in reply.choices:
            tokens.append([*choice.prompt_token_ids, *choice.token_ids])
            logprobs.append(choice.logprobs.token_logprobs)
            rewards.append(float(choice.text.strip() == problem.answer))
    width, longest = len(tokens[0]) - len(logprobs[0]), max(map(len, logprobs))
    return SampledBatch(
        tokens=torch.tensor([row + [0] * (width + longest - len(row)) for row in tokens]),
        server_logprobs=torch.tensor([row + [0.0] * (longest - len(row)) for row in logprobs]),
        mask=torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in logprobs]),
        rewards=torch.tensor(rewards),
        prompt=width,
        group=group,
    )


def _table(cases: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="fp8ext demo rl", title_justify="left")
    for column in ("variant", "seeds", "reward", "held out", "mismatch KL", "ESS", "entropy", "s a step"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name in dict.fromkeys(case["variant"] for case in cases):
        of = [case for case in cases if case["variant"] == name]
        late = {curve: [_later(case[curve]) for case in of] for curve in CURVES}
        table.add_row(
            name,
            str(len(of)),
            _spread(late["reward"], "{:.1%}"),
            _spread([case["accuracy"] for case in of], "{:.1%}"),
            _spread(late["mismatch_kl"], "{:.1e}"),
            _spread(late["ess"], "{:.3f}"),
            _spread(late["entropy"], "{:.3f}"),
            f"{statistics.median(sum(case['step_seconds'].values()) for case in of):.2f}",
        )
    return table


def _later(curve: Sequence[float]) -> float:
    """Return the mean of a curve's last steps, `LATER` of all."""
    return statistics.fmean(curve[-max(1, round(LATER * len(curve))) :])


def _spread(values: Sequence[float], form: str) -> str:
    middle = form.format(statistics.median(values))
    return (
        middle if len(values) < 2 else f"{middle} ({form.format(min(values))} to {form.format(max(values))})"
    )


def _same(case: dict[str, Any], key: tuple[str, int], plan: Plan) -> bool:
    return (case["variant"], case["seed"]) == key and case["plan"] == asdict(plan)


def _read(out: Path | None) -> dict[str, Any]:
    """Cases so far, and the provenance of each call that made some: a case names its own by `run`."""
    if out is None or not out.exists():
        return {"runs": [], "cases": []}
    results: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return results


def _write(out: Path | None, results: dict[str, Any]) -> None:
    """Write beside the file first: what ends this process leaves the runs that it has."""
    if out is not None:
        beside = out.with_name(f"{out.name}.part")
        text = json.dumps({**results, "provenance": results["runs"][-1]}, indent=1)
        beside.write_text(f"{text}\n", encoding="utf-8")
        beside.replace(out)


@contextlib.contextmanager
def _timed(seconds: list[float]) -> Any:
    began = time.monotonic()
    yield
    seconds.append(time.monotonic() - began)

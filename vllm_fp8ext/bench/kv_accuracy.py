# SPDX-License-Identifier: Apache-2.0
"""Error of an FP8 KV cache, by policy of its scales.

K and V of the model grow or shrink a hundredfold meanwhile.

    fp8ext bench kv-accuracy --out kv_accuracy.json

The tiny model of this package, on problems that it gets all right. Each update multiplies K (`k_norm`) and V (`v_proj`) of
all layers and divides `q_norm` and `o_proj` by the same, so that the function stays; one pair of channels of one layer's K is
30 times as large as the others. The fixed prompts are read teacher-forced, K and V through the cache, and log-probabilities
of the whole vocabulary are compared with those of a server that has the same weights and a BF16 KV cache. Weights are served
in BF16: every difference comes from the cache.

Scales: `1.0` for everything; `stale`, calibrated before the first update and kept; and the policies that follow the weights.
"""

import argparse
import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import httpx
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from transformers import Qwen3ForCausalLM

from vllm_fp8ext.bench.options import CommandLine
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.checkpoints import LATE, AdditionProblem, problems
from vllm_fp8ext.demo.server import MODEL, SMALL, Server, serve_options
from vllm_fp8ext.kernels.attention.kv_cache import fit
from vllm_fp8ext.kv_trainer import CachedKV, cached_kv, scales_of
from vllm_fp8ext.kv_types import Scales
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.schema import KvScales

console = Console(width=140, highlight=False)
POLICIES = ("history", "calibrate", "provided", "stale", "1.0")
"""In this order on one server a direction: the history is of its own series alone."""
DIRECTIONS = {"grows": 100.0, "shrinks": 0.01}
"""Factors of K and V after the last update."""
Granularity: TypeAlias = Literal["layer", "head"]
OUTLIER_LAYER, OUTLIER_CHANNEL, OUTLIER = 1, 5, 30.0
ALPHABET = "0123456789+="
FIRST, END = 3, 1
"""Token ids of `0` and of the end of a problem."""
TOKENS, ANSWER_AT = 13, 8
"""Tokens of a problem with its answer, and where the answer begins."""
CALIBRATION = 64
"""Problems, others than those that are measured."""
Weights = dict[str, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says; the exit code."""
    options = _parser().parse_args(arguments)
    origin = provenance()
    torch.set_num_threads(options.threads)
    rows = encoded(problems(options.prompts, seed=5))
    calibration = encoded(problems(CALIBRATION, seed=6)).tolist()
    cases: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        line = [*SMALL, "--max-logprobs", "-1", *serve_options(options.serve)]
        plain = Server(LATE, folder / "bf16.log", arguments=line, settings={"ignore": ["*"]})
        stack.enter_context(plain).wait(600)
        for direction in options.directions:
            run = Run(direction, options.updates, rows, calibration)
            run.reference(plain)
            for granularity in options.granularity:
                settings = _settings(granularity, calibration, options.policies)
                with Server(
                    *(LATE, folder / f"{direction}_{granularity}.log"),
                    arguments=[*line, "--kv-cache-dtype", "fp8"],
                    settings={"ignore": ["*"], "kv_scales": settings},
                ) as ours:
                    ours.wait(600)
                    for case in run.policies(ours, options.policies, granularity):
                        _show(case)
                        cases.append(case)
                write_cases(options.out, origin, cases, prompts={"count": options.prompts, "tokens": TOKENS})
    return 0


def _settings(granularity: str, calibration: list[list[int]], policies: Sequence[str]) -> dict[str, Any]:
    return {
        "policy": "history" if "history" in policies else "calibrate",
        "granularity": granularity,
        "tokens": CALIBRATION * TOKENS,
        "prompts": calibration,
        "record_every": 1,
    }


def _show(case: dict[str, Any]) -> None:
    console.print(
        f"{case['direction']:8} x {case['factor']:<8.3g} {case['policy']:10} by {case['granularity']:6} "
        f"mean KL {case['mean_kl']:8.2g}  logprob error {case['logprob_error']:8.2g}  "
        f"{case['saturated_fraction']:7.2%} saturated  {case['accuracy']:6.1%} right"
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandLine("kv-accuracy", __doc__)
    parser.add_choice("--policies", POLICIES, list(POLICIES), "of the scales")
    parser.add_choice("--directions", DIRECTIONS, list(DIRECTIONS), "of K and V")
    parser.add_choice(
        "--granularity",
        get_args(Granularity),
        ["layer"],
        "of the scales, by head with FlashAttention 3 only",
    )
    parser.add_argument("--updates", type=int, default=8, help="until K and V are a hundredfold")
    parser.add_argument("--prompts", type=int, default=32, help="read after each update")
    parser.add_argument("--threads", type=int, default=2, help="of torch, for what the trainer would compute")
    parser.add_argument("--serve", nargs="*", default=[], help="more options of vllm serve: a=b")
    return parser


class Run:
    """One series of weights: K and V grow, or shrink, with each update."""

    def __init__(self, direction: str, updates: int, rows: Tensor, calibration: list[list[int]]) -> None:
        self.direction, self.rows = direction, rows
        self.factors = [DIRECTIONS[direction] ** (n / updates) for n in range(updates + 1)]
        self.expected: list[Tensor] = []
        self.cached: list[CachedKV] = []
        """K and V of the prompts in the trainer, by update, and those behind scales."""
        self.calibrated: list[CachedKV] = []
        model = Qwen3ForCausalLM.from_pretrained(LATE, dtype=torch.float32)
        first = {
            name: tensor.float().clone()
            for name, tensor in model.state_dict().items()
            if name != "lm_head.weight"
        }
        self.weights = [grown(first, factor) for factor in self.factors]
        model = model.bfloat16()
        for tensors in self.weights:
            model.load_state_dict(tensors, strict=False)
            self.cached.append(cached_kv(model, rows.tolist()))
            self.calibrated.append(cached_kv(model, calibration))

    def reference(self, server: Server) -> None:
        """Log-probabilities with a BF16 KV cache."""
        with server.client() as client:
            for tensors in self.weights:
                client.push(tensors)
                self.expected.append(log_probabilities(server, self.rows))

    def policies(
        self, server: Server, policies: Sequence[str], granularity: Granularity
    ) -> Iterator[dict[str, Any]]:
        """A case of each update. The first weights are calibrated, whatever the policy."""
        for policy, (update, tensors) in itertools.product(policies, enumerate(self.weights)):
            with server.client() as client:
                client.push(tensors, kv_scales=self._asked(client, policy, granularity, update))
                scales = client.kv_scales().scales
            case = {"policy": policy, "granularity": granularity, "direction": self.direction}
            case |= {"update": update, "factor": self.factors[update]}
            case |= compared(self.expected[update], log_probabilities(server, self.rows), self.rows)
            yield case | {"saturated_fraction": saturated(self.cached[update], scales)}

    def _asked(self, client: Client, policy: str, granularity: Granularity, update: int) -> KvScales:
        layers = list(client.kv_scales().scales)
        if policy == "1.0":
            ones: Any = {layer: dict.fromkeys("qkv", 1.0) for layer in layers}
            return KvScales(policy="provided", scales=ones)
        if policy == "provided":
            provided: Any = scales_of(self.calibrated[update], layers, granularity=granularity)
            return KvScales(policy="provided", scales=provided)
        if update == 0 or policy == "calibrate":
            return KvScales(policy="calibrate")
        return KvScales(policy="history" if policy == "history" else "static")


def encoded(items: list[AdditionProblem]) -> Tensor:
    """Token ids of problems with their answers, a row each."""
    return torch.tensor(
        [[FIRST + ALPHABET.index(letter) for letter in item.prompt + item.answer] + [END] for item in items]
    )


def grown(weights: Weights, factor: float) -> Weights:
    """Scale K and V of BF16 weights by `factor`, with the same function.

    The K of one layer gets outliers.

    Rotary embedding turns channels `c` and `c + D/2` into each other: both are outliers, else the function would change.
    """
    scaled = dict(weights)
    for name, tensor in weights.items():
        if name.endswith(("k_norm.weight", "v_proj.weight")):
            scaled[name] = tensor * factor
        elif name.endswith(("q_norm.weight", "o_proj.weight")):
            scaled[name] = tensor / factor
    for kind, times in (("k", OUTLIER), ("q", 1 / OUTLIER)):
        name = f"model.layers.{OUTLIER_LAYER}.self_attn.{kind}_norm.weight"
        norm = scaled[name].clone()
        norm.view(2, -1)[:, OUTLIER_CHANNEL] *= times
        scaled[name] = norm
    return {name: tensor.bfloat16() for name, tensor in scaled.items()}


def log_probabilities(server: Server, rows: Tensor) -> Tensor:
    """Return logprobs of the vocabulary at all places but the first: `[rows, tokens - 1, vocabulary]`."""
    body = {"model": MODEL, "prompt": rows.tolist(), "max_tokens": 1, "temperature": 0, "prompt_logprobs": -1}
    reply = (
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=600, trust_env=False)
        .raise_for_status()
        .json()
    )
    places = [choice["prompt_logprobs"][1:] for choice in sorted(reply["choices"], key=lambda c: c["index"])]
    size = len(places[0][0])
    return torch.tensor(
        [[[place[str(id)]["logprob"] for id in range(size)] for place in row] for row in places]
    )


def compared(expected: Tensor, actual: Tensor, rows: Tensor) -> dict[str, float]:
    """`mean_kl`: KL(expected ‖ actual) a token; `logprob_error`: mean difference of the true tokens' log-probabilities."""
    kl = F.kl_div(actual.double(), expected.double(), log_target=True, reduction="none").sum(-1)
    true = rows[:, 1:, None]
    error = (expected.gather(-1, true) - actual.gather(-1, true)).abs()
    return {
        "mean_kl": kl.mean().item(),
        "logprob_error": error.mean().item(),
        "accuracy": accuracy(actual, rows),
        "accuracy_bf16": accuracy(expected, rows),
    }


def accuracy(logprobs: Tensor, rows: Tensor) -> float:
    """Share of the answers' tokens that are the likeliest."""
    right = logprobs.argmax(-1) == rows[:, 1:]
    return right[:, ANSWER_AT - 1 :].float().mean().item()


def saturated(cached: CachedKV, scales: Scales) -> float:
    """Largest share of K and V of a layer beyond the largest code."""
    worst = 0.0
    for parts, layer in zip(cached, scales.values(), strict=True):
        for values, kind in zip(parts, ("k", "v"), strict=True):
            sums = fit(values, torch.tensor(layer[kind]))
            worst = max(worst, sums.saturated / sums.elements)
    return worst

# SPDX-License-Identifier: Apache-2.0
"""Measures how far an engine's distributions over the vocabulary are from another one's.

Both serve the same weights and read the same prompts of random tokens. A hook on vLLM's logits processor keeps the logits
of prompts, so that no answer has to hold a vocabulary for each token.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from vllm_fp8ext.bench.engine_kinds import Kind
from vllm_fp8ext.bench.engines import Engine
from vllm_fp8ext.errors import ConfigError

console = Console(width=140, highlight=False)
SEED = 1
HOOKS = "fp8ext_logits"
"""Attribute of a worker that records: its hooks, and logits so far."""
Distance: TypeAlias = dict[str, float]


def prompts_of(text: str, longest: int) -> tuple[int, int]:
    """Prompts, and tokens of each, of `8x512`.

    Raises:
        ConfigError: it is something else, fewer than two tokens, or more than `longest`, which engines take.
    """
    count, _, tokens = text.partition("x")
    if not (count.isdigit() and tokens.isdigit() and int(count) > 0 and 2 <= int(tokens) <= longest):
        raise ConfigError(
            f"--divergence: expected PROMPTSxTOKENS such as 8x512, with 2 to {longest} tokens, found {text!r}"
        )
    return int(count), int(tokens)


def divergences(engines: Mapping[Kind, Engine], prompts: tuple[int, int]) -> dict[Kind, Distance]:
    """Measure each engine of blockfp8 against the first one with the same KV cache.

    Returns `kl`, the mean divergence of Kullback and Leibler in nats for each token, and `same_choice`, the share of tokens
    for which both have the same most probable one. The first one is measured against itself, read again.
    """
    measured: dict[Kind, Distance] = {}
    with tempfile.TemporaryDirectory(prefix="fp8ext-") as folder:
        first: dict[str, Tensor] = {}
        for kind, engine in engines.items():
            if kind.variant != "blockfp8":
                continue
            for _ in range(1 if kind.kv in first else 2):
                file = Path(folder) / "logits.pt"
                with engine.turn():
                    engine.prompt_logits(*prompts, SEED, file)
                logits = torch.load(file)
                if kind.kv not in first:
                    first[kind.kv] = logits
                    continue
                measured[kind] = distance(first[kind.kv], logits)
                console.print(
                    f"{kind}: KL {measured[kind]['kl']:.3g}, {measured[kind]['same_choice']:.2%} same choices"
                )
    return measured


def distance(expected_TV: Tensor, logits_TV: Tensor) -> Distance:
    """Return `kl` of `logits_TV` from `expected_TV`, and `same_choice`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total, same = 0.0, 0
    for expected, logits in zip(expected_TV.split(256), logits_TV.split(256), strict=True):
        of_expected, of_logits = (F.log_softmax(part.to(device).double(), -1) for part in (expected, logits))
        total += float((of_expected.exp() * (of_expected - of_logits)).sum())
        same += int((of_expected.argmax(-1) == of_logits.argmax(-1)).sum())
    return {"kl": total / len(expected_TV), "same_choice": same / len(expected_TV)}


def write_prompt_logits(engine: Any, prompts: int, tokens: int, seed: int, file: Path) -> None:
    """Have `vllm.LLM` read prompts of random tokens one by one; write the logits after each token, fp32 `[T, V]`."""
    from vllm import SamplingParams

    draw = torch.Generator().manual_seed(seed)
    vocabulary = engine.model_config.get_vocab_size()
    asked = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False, ignore_eos=True)
    engine.collective_rpc(begin_recording)
    for _ in range(prompts):
        prompt = torch.randint(vocabulary, (tokens,), generator=draw).tolist()
        engine.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    engine.collective_rpc(end_recording, args=(str(file),))


def begin_recording(worker: Any) -> None:
    """Keep the logits of several tokens at once: those of prompts. A sampled token's come alone."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    kept: list[Tensor] = []

    def keep(module: Any, arguments: Any, logits: Tensor | None) -> None:
        if logits is not None and len(logits) > 1:
            kept.append(logits.float().cpu())

    model = worker.model_runner.get_model()
    hooks = [
        module.register_forward_hook(keep)
        for module in model.modules()
        if isinstance(module, LogitsProcessor)
    ]
    setattr(worker, HOOKS, (hooks, kept))


def end_recording(worker: Any, file: str) -> None:
    """Write what was kept, on the rank that has logits of its own for everything: the first."""
    hooks, kept = getattr(worker, HOOKS)
    delattr(worker, HOOKS)
    for hook in hooks:
        hook.remove()
    if worker.rank == 0:
        torch.save(torch.cat(kept), file)

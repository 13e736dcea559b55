# SPDX-License-Identifier: Apache-2.0
"""Commits that fall into prompts of many steps. Writes what it saw, as JSON, to a file."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.serve.client import AsyncClient
from vllm_fp8ext.serve.embedded import embedded
from vllm_fp8ext.update.contract.labels import Label
from vllm_fp8ext.update.transports.wire import stored

OPTIONS: dict[str, Any] = {
    "model": str(EARLY),
    "quantization": "blockfp8",
    "max_model_len": 2048,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_tokenizer_init": True,
}
PROMPTS = [[3 + (7 * i + i * i // (5 + seed)) % 100 for i in range(1280)] for seed in range(8)]
"""Of 40 steps each."""
TOKENS = 4
ATTEMPTS = 8
Asking = Callable[[], Coroutine[Any, Any, list[dict[str, Any]]]]


def wanted(**more: Any) -> SamplingParams:
    """Greedily, with a log-probability of each token of the prompt."""
    asked = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**asked, "prompt_logprobs": 0, **more})


def told(output: Any, choice: Any, prompt: list[int]) -> dict[str, Any]:
    """What an output says of one of its choices: spans, tokens, and the log-probabilities of the prompt's tokens."""
    labels = [(Label.decode(span.version), span) for span in choice.weight_versions or ()]
    rows = output.prompt_logprobs or []
    return {
        "spans": [[label.version, span.start, span.end] for label, span in labels],
        "epochs": [label.epoch for label, _ in labels],
        "tokens": list(choice.token_ids),
        "logprobs": [row[token].logprob for row, token in zip(rows, prompt, strict=False) if row],
        "cached": output.num_cached_tokens,
    }


async def ask(engine: AsyncLLM, prompt: list[int], name: str, **more: Any) -> list[dict[str, Any]]:
    """One request: what it says of each choice."""
    async for output in engine.generate({"prompt_token_ids": prompt}, wanted(**more), name):
        last = output
    return [told(last, choice, prompt) for choice in last.outputs]


async def session(engine: AsyncLLM, prompt: list[int], name: str) -> list[dict[str, Any]]:
    """One request that takes its input bit by bit, with one bit."""

    async def inputs() -> AsyncGenerator[StreamingInput]:
        yield StreamingInput(prompt={"prompt_token_ids": prompt})

    asked = wanted(prompt_logprobs=None, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(inputs(), asked, name):
        if output.outputs[0].weight_versions:
            last = output
    return [told(last, last.outputs[0], prompt)]


async def met(weights: AsyncClient, ask: Asking, commits: int = 1) -> dict[str, Any]:
    """What a request says, into whose prompt so many commits may have fallen."""
    before = (await weights.weights()).epoch
    asked = asyncio.create_task(ask())
    await asyncio.sleep(0.05)
    for _ in range(commits):
        await weights.rollback()
        await asyncio.sleep(0.02)
    return {"choices": await asked, "before": before}


async def met_for_sure(
    weights: AsyncClient, ask: Asking, commits: int = 1, *, ahead: Asking | None = None
) -> dict[str, Any]:
    """The same, of a request whose tokens are all of the last weights: on a busy machine commits may come too late. `ahead`:
    what is asked before it each time."""
    for _ in range(ATTEMPTS):
        if ahead:
            await ahead()
        result = await met(weights, ask, commits)
        last = result["before"] + commits
        if all((choice["epochs"][-1], choice["spans"][-1][1]) == (last, 0) for choice in result["choices"]):
            return result
    raise AssertionError(f"in {ATTEMPTS} attempts no prompt met {commits} commits: {result}")


async def many_requests(engine: AsyncLLM, weights: AsyncClient) -> list[dict[str, Any]]:
    """Requests of all lengths, each followed by another, beside commits without a break."""
    over = False

    async def user(number: int) -> list[dict[str, Any]]:
        collected = []
        while not over:
            prompt = PROMPTS[number][: 40 + 90 * (len(collected) * 5 % 7)]
            collected += await ask(engine, prompt, f"many_requests {number} {len(collected)}", max_tokens=8)
        return [{**each, "prompt": number} for each in collected]

    users = [asyncio.create_task(user(number)) for number in range(6)]
    for _ in range(24):
        await weights.rollback()
        await asyncio.sleep(0.1)
    over = True
    return [each for collected in await asyncio.gather(*users) for each in collected]


async def main(out: Path) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**OPTIONS))
    facts: dict[str, Any] = {}
    async with embedded(engine) as weights:
        await weights.push(dict(stored(LATE)), version="late")
        for version in ("late", "epoch-0"):
            facts[version] = [(await ask(engine, prompt, version))[0] for prompt in PROMPTS]
            await weights.rollback()
        facts["once"] = [await met(weights, partial(ask, engine, prompt, "once")) for prompt in PROMPTS]
        often = partial(ask, engine, PROMPTS[0], "often")
        facts["often"] = [await met_for_sure(weights, often, commits) for commits in range(1, 6)]
        two = partial(ask, engine, PROMPTS[0], "two", n=2, temperature=1.0, top_k=1)
        facts["two choices"] = await met_for_sure(weights, two)
        plain = partial(ask, engine, prompt_logprobs=None)
        half, whole = (partial(plain, PROMPTS[1][:length], "cached") for length in (640, None))
        await half()
        facts["cached"] = await whole()
        facts["cached before"] = await met_for_sure(weights, whole, ahead=half)
        facts["session"] = await met_for_sure(weights, partial(session, engine, PROMPTS[3], "session"))
        facts["many_requests"] = await many_requests(engine, weights)
    engine.shutdown()
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

# SPDX-License-Identifier: Apache-2.0
"""A trainer that holds the engine in its own process, updated in place. Takes a file, to which it writes what it
saw, as JSON, and the KV cache's dtype; then it is killed."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import AsyncClient
from vllm_fp8ext.serve.embedded import embedded
from vllm_fp8ext.update.transports.wire import stored

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from embedded import sample, update

OPTIONS: dict[str, Any] = {
    "model": str(EARLY),
    "quantization": "blockfp8",
    "max_model_len": 2048,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_tokenizer_init": True,
}
SETTINGS: dict[str, Any] = {"staging": "inplace", "update_lifetime_seconds": 30.0}
KV_SCALES = {"policy": "calibrate", "prompts": [[5 + 7 * i % 110 for i in range(100)]]}
"""Of an FP8 KV cache."""


async def kind(call: Coroutine[Any, Any, Any]) -> str | None:
    """Kind of the refusal of a call, if it was refused."""
    try:
        await call
    except UpdateError as error:
        return error.kind
    return None


async def told(weights: AsyncClient) -> dict[str, Any]:
    result = await weights.weights()
    return {**result.model_dump(include={"state", "epoch", "poisoned", "twin_bytes", "previous_version"})}


async def scales_of(weights: AsyncClient) -> dict[str, Any] | None:
    """Of the KV cache, where it has any."""
    try:
        return (await weights.kv_scales()).scales
    except UpdateError as error:
        if error.kind != "no-kv-scales":
            raise
        return None


async def long_request(engine: AsyncLLM, name: str) -> int:
    """Tokens of a request that goes on until its length."""
    wanted = SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True, detokenize=False)
    count = 0
    async for output in engine.generate({"prompt_token_ids": [1, 2, 3]}, wanted, name):
        count = len(output.outputs[0].token_ids)
    return count


async def session(engine: AsyncLLM, name: str, goes_on: asyncio.Event) -> list[int]:
    """Tokens of a request that takes its input bit by bit; the second bit once it goes on."""
    wanted = SamplingParams(
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )

    async def inputs() -> AsyncGenerator[StreamingInput]:
        yield StreamingInput(prompt={"prompt_token_ids": list(range(3, 60))})
        await goes_on.wait()
        yield StreamingInput(prompt={"prompt_token_ids": list(range(60, 80))})

    tokens: list[int] = []
    async for output in engine.generate(inputs(), wanted, name):
        tokens += output.outputs[0].token_ids
    return tokens


def broken() -> Iterator[bytes]:
    """A body that can't be read to its end."""
    yield b"abc"
    raise FileNotFoundError("a shard is gone")


def merged(wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model that holds these values until the last one was yielded, and others then."""
    model = {name: tensor.clone() for name, tensor in wanted.items()}
    yield from model.items()
    for tensor in model.values():
        tensor.fill_(7.0)


async def main(out: Path, kv_dtype: str) -> None:
    settings = {**SETTINGS, **({"kv_scales": KV_SCALES} if kv_dtype == "fp8" else {})}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**OPTIONS, kv_cache_dtype=kv_dtype, additional_config={"fp8ext": settings})
    )
    early, late = dict(stored(EARLY)), dict(stored(LATE))
    facts: dict[str, Any] = {}
    async with embedded(engine) as weights:
        cold = await weights.digests()
        facts["start"] = await told(weights)
        scales = {"early": await scales_of(weights)}
        facts["sampled early"] = await sample(engine, "early")
        goes_on = asyncio.Event()
        goes_on.set()
        facts["session"] = await session(engine, "alone", goes_on)
        goes_on.clear()
        bit_by_bit = asyncio.create_task(session(engine, "bit by bit", goes_on))
        await asyncio.sleep(1.0)
        facts["recompute beside a session"] = await kind(weights.push(late, running="recompute"))
        facts["after that"] = await told(weights)
        goes_on.set()
        facts["session that went on"] = await bit_by_bit
        running = asyncio.create_task(long_request(engine, "beside"))
        await asyncio.sleep(0.2)
        await update(weights, late, "late")
        facts["late"] = await told(weights)
        facts["sampled late"] = await sample(engine, "late")
        facts["running went on"] = await running
        facts["verified"] = (await weights.verify()).epoch
        scales["late"] = await scales_of(weights)
        facts["rollback"] = await kind(weights.rollback())
        facts["wait"] = await kind(weights.push(early, running="wait"))
        facts["after wait"] = (await told(weights))["state"]

        opened = await weights.open()
        try:
            await weights.put_chunk(opened.id, 0, broken(), 8)
        except FileNotFoundError as error:
            facts["an error of the trainer's"] = str(error)
        await weights.abandon(opened.id)
        facts["abandoned before anything came"] = (await told(weights))["state"]
        infinite = {**late, "model.norm.weight": late["model.norm.weight"] * torch.inf}
        facts["refused half-way"] = await kind(weights.push(infinite))
        facts["half-way"] = await told(weights)
        facts["sampled half-way"] = await sample(engine, "half-way")
        scales["half-way"] = await scales_of(weights)
        facts["partial on half"] = await kind(weights.push(early, partial=True, base_epoch=1))
        await weights.push(merged(early), version="early again")
        facts["healed"] = await told(weights)
        facts["digests equal"] = await weights.digests() == cold.model_copy(
            update={"epoch": 2, "version": "early again"}
        )
        scales["early again"] = await scales_of(weights)
        facts["addresses equal"] = (await weights.digests()).addresses == cold.addresses
        facts["sampled early again"] = await sample(engine, "early-again")

        names = sorted(late)
        parts = [{name: late[name] for name in half} for half in (names[::2], names[1::2])]
        opened = await weights.open()
        await weights.put_chunk(opened.id, 0, save(parts[0]))
        await engine.wake_up()  # both make vLLM's scheduler go on
        await engine.resume_generation()
        begun = asyncio.create_task(sample(engine, "begun half-way"))
        await asyncio.sleep(0.5)
        facts["stood still"] = not begun.done()
        facts["asked half-way"] = [
            await kind(weights.digests()),
            await kind(weights.verify()),
            await kind(weights.sleep()),
        ]
        await weights.put_chunk(opened.id, 1, save(parts[1]))
        await weights.commit(opened.id)
        facts["sampled by the whole"] = await begun
        await update(weights, early, "early, once more")

        facts["no sleep over the routes"] = await kind(weights.sleep())
        await engine.sleep(1)
        facts["asleep"] = (await told(weights))["state"]
        scales["asleep"] = await scales_of(weights)
        facts["asleep refused"] = [
            await kind(call)
            for call in (weights.open(), weights.verify(), weights.digests(), weights.rollback())
        ]
        await engine.wake_up(["weights"])
        facts["update before the KV cache wakes"] = await kind(weights.push(late, version="late, asleep"))
        await engine.wake_up()
        facts["sampled after sleep"] = await sample(engine, "awake")
        facts["verified after sleep"] = (await weights.verify()).version
        opened = await weights.open()
        await engine.sleep(2)
        facts["open update, level 2"] = (await weights.update(opened.id)).state
        await engine.wake_up()
        facts["discarded"] = await told(weights)
        facts["sampled discarded"] = await sample(engine, "discarded")
        await update(weights, late, "late again")
        facts["healed from sleep"] = (await told(weights))["state"]
        facts["sampled late again"] = await sample(engine, "late-again")
        scales["late again"] = await scales_of(weights)
        facts["scales"] = scales
        opened = await weights.open()
        await weights.put_chunk(opened.id, 0, save(parts[0]))
    async with embedded(engine) as weights:
        facts["left half-way"] = [(await weights.weights()).update, (await told(weights))["state"]]
        await update(weights, late, "late, after leaving")
        facts["sampled after leaving"] = await sample(engine, "left")
        facts["its processes"] = [process.pid for process in psutil.Process().children(recursive=True)]
        out.write_text(json.dumps(facts))
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))

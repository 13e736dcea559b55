# SPDX-License-Identifier: Apache-2.0
"""Small mixtures of experts, served and updated one after the other in one process. Takes a file, to
which it writes what it saw, as JSON, and a file of settings, each the arguments of `scenario`."""

import asyncio
import json
import os
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import AsyncClient
from vllm_fp8ext.serve.embedded import embedded
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import EXPERT

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from routing import FOLLOWED, followed, taken

PROMPTS = [[3 + (7 * i + 11 * row) % 120 for i in range(24)] for row in range(3)]


def engine_on(
    model: str, staging: str, ranks: int, share_out: bool, expanded: bool, ignore: list[str]
) -> AsyncLLM:
    """`expanded`: latent attention is served as plain attention."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "auto" if ranks == 1 else "0|1"
    os.environ["VLLM_MLA_DISABLE"] = str(int(expanded))
    options: dict[str, Any] = {"tensor_parallel_size": ranks, "enable_expert_parallel": share_out}
    options["distributed_executor_backend"] = "uni" if ranks == 1 else "mp"
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            quantization="blockfp8",
            max_model_len=512,
            enforce_eager=True,
            kv_cache_memory_bytes=32 << 20,
            skip_tokenizer_init=True,
            worker_extension_cls=FOLLOWED,
            attention_backend=None if expanded else latent_backend(model),
            additional_config={"fp8ext": {"staging": staging, "ignore": ignore}},
            **options,
        )
    )


def latent_backend(model: str) -> str | None:
    """Attention of a model with a latent: a CPU with AMX would take one that packs its weights away."""
    latent = json.loads((Path(model) / "config.json").read_text()).get("kv_lora_rank")
    return "CPU_MLA" if latent else None


async def answers(engine: AsyncLLM, name: str, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """Prompts, and the token ids and log-probabilities that the engine goes on with, greedily, one request at a time."""
    wanted = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    found: list[Any] = []
    for number, prompt in enumerate(prompts):
        async for output in engine.generate({"prompt_token_ids": prompt}, wanted, f"{name} {number}"):
            one = output.outputs[0]
        ids = list(one.token_ids)
        found.append(
            [prompt, ids, [step[token].logprob for step, token in zip(one.logprobs or [], ids, strict=True)]]
        )
    return found


async def sampled(engine: AsyncLLM, name: str) -> list[Any]:
    """The same, and the experts that its routers chose since it was last asked, the same on all ranks."""
    return [await answers(engine, name), await taken(engine)]


def fused(tensors: dict[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    """The same weights, with the experts of each layer in two tensors."""
    left = dict(tensors)
    for name, whole in manifest.fused.items():
        left[name] = torch.cat([left.pop(part) for part in whole.parts]).view(whole.shape)
    assert not any(EXPERT.search(name) for name in left)
    return left


async def refused(weights: AsyncClient, tensors: dict[str, Tensor], damage: str) -> dict[str, Any]:
    """What an update is answered in which one matrix of the last expert is not finite, or missing."""
    name = max(name for name in tensors if EXPERT.search(name))
    sent = dict(tensors)
    if damage == "missing":
        del sent[name]
    else:
        sent[name] = torch.full_like(sent[name], torch.nan)
    try:
        await weights.push(sent)
    except UpdateError as error:
        return {"tensor": name, "kind": error.kind, **error.details}
    return {}


async def not_told(weights: AsyncClient, tensors: dict[str, Tensor]) -> dict[str, str]:
    """What each fused tensor is answered whose shape is the same both ways, in an update that does not say how it lies."""
    found: dict[str, str] = {}
    for name, whole in Manifest.from_dict(await weights.manifest()).fused.items():
        if whole.shape[1] != whole.shape[2]:
            continue
        try:
            await weights.push({name: tensors[name].transpose(1, 2).contiguous()})
        except UpdateError as error:
            found[name] = error.kind
    return found


async def updated(
    weights: AsyncClient,
    engine: AsyncLLM,
    late: dict[str, Any],
    early: dict[str, Any],
    seen: Callable[[AsyncLLM, str], Awaitable[Any]] = sampled,
) -> dict[str, Any]:
    """The whole of `late`, in chunks of two tensors in any order, then back with fused experts, then parts of it.
    What `seen` finds is noted after each of the first two."""
    facts: dict[str, Any] = {}
    names = sorted(late)
    random.Random(0).shuffle(names)
    opened = await weights.open(version="late")
    for number, start in enumerate(range(0, len(names), 2)):
        body = save({name: late[name] for name in names[start : start + 2]})
        await weights.put_chunk(opened.id, number, body)
    await weights.commit(opened.id)
    facts["late"] = await seen(engine, "late")
    together = fused(early, Manifest.from_dict(await weights.manifest()))
    facts["not told"] = await not_told(weights, together)
    facts["late digests"] = (await weights.digests()).model_dump()
    facts["refused"] = [await refused(weights, early, damage) for damage in ("missing", "non-finite")]
    facts["after refusals"] = (await weights.weights()).state
    try:
        facts["digests after refusals"] = (await weights.digests()).model_dump()
    except UpdateError as error:
        facts["digests after refusals"] = error.kind
    await weights.push(
        fused(early, Manifest.from_dict(await weights.manifest())), version="early", expert_layout="out_in"
    )
    facts["early again"] = await seen(engine, "early again")
    facts["early digests"] = (await weights.digests()).model_dump()
    alone = "experts.1.up_proj.weight", "experts.1.w3.weight"
    some = [name for name in names if ".experts.3." in name or name.endswith(alone)]
    epoch = (await weights.weights()).epoch
    part = {name: late[name] for name in some}
    await weights.push(part, version="some experts", partial=True, base_epoch=epoch)
    facts["some"] = some
    facts["some digests"] = (await weights.digests()).model_dump()
    facts["verified"] = (await weights.verify()).version
    return facts


async def scenario(
    served: str,
    early: str,
    late: str,
    staging: str,
    ranks: int,
    share_out: bool,
    expanded: bool,
    ignore: list[str],
) -> dict[str, Any]:
    """`served`: the early checkpoint, in the form in which an engine starts on it. `share_out`: expert parallelism."""
    engine = engine_on(served, staging, ranks, share_out, expanded, ignore)
    await followed(engine)
    facts: dict[str, Any] = {"early": await sampled(engine, "early")}
    async with embedded(engine) as weights:
        facts["cold digests"] = (await weights.digests()).model_dump()
        facts["manifest"] = await weights.manifest()
        facts["twin bytes"] = (await weights.weights()).twin_bytes
        facts |= await updated(weights, engine, dict(stored(Path(late))), dict(stored(Path(early))))
    engine.shutdown(timeout=0.1)
    return facts


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[2]).read_text())
    Path(sys.argv[1]).write_text(json.dumps([asyncio.run(scenario(**setting)) for setting in settings]))

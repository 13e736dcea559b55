# SPDX-License-Identifier: Apache-2.0
"""Runs the whole row of families of `zoo_models`, one after the other. Takes a file, to which it writes what it saw, as JSON,
and names of families."""

import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import PIL.Image
import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from zoo_models import HYBRID, POOLING, ZOO, Family

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests

Facts = dict[str, Any]
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47, 48]]


def engine_on(folder: Path, family: Family) -> LLM:
    images = int(family.image is not None)
    options: dict[str, Any] = {"limit_mm_per_prompt": {"image": images, "video": 0}} | family.options
    if family.kind == POOLING:
        options["runner"] = "pooling"
    return LLM(
        str(folder),
        quantization="blockfp8",
        max_model_len=1024,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=family.processor is None,
        **options,
    )


def sample(llm: LLM, prompts: list[list[int]] = PROMPTS, tokens: int = 8) -> list[Any]:
    """Tokens that the engine goes on with, greedily, and their log-probabilities; of each prompt. Of a pooling model, its
    probabilities."""
    if len(prompts) > 1:  # one by one: floats depend on who else is in a step
        return [answer for prompt in prompts for answer in sample(llm, [prompt], tokens)]
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    if llm.model_config.runner_type == "pooling":
        return [[[], output.outputs.probs] for output in llm.classify(asked, use_tqdm=False)]
    wanted = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    return [sampled(output) for output in llm.generate(asked, wanted, use_tqdm=False)]


def sampled(output: Any) -> list[Any]:
    """Tokens of an answer, their log-probabilities, and how many tokens of its prompt were found in the cache."""
    ids = list(output.outputs[0].token_ids)
    steps = zip(ids, output.outputs[0].logprobs or [], strict=True)
    return [ids, [step[token].logprob for token, step in steps], output.num_cached_tokens]


def see(llm: LLM, family: Family) -> list[Any]:
    """What the engine says of two images, each of which it is asked for once more, as others of the same prompt are."""
    if family.image is None:
        return []
    wanted = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=0)
    found = []
    for color in ("red", "blue", "red"):
        image = PIL.Image.linear_gradient("L").resize((64, 96)).convert("RGB")
        image.paste(color, (0, 0, 32, 48))
        asked: Any = {"prompt_token_ids": family.image, "multi_modal_data": {"image": image}}
        (output,) = llm.generate([asked], wanted, use_tqdm=False)
        found.append(sampled(output))
    return found


def refusal(call: Callable[[], Any]) -> str:
    """What a call is refused with, and what it says of tensors."""
    try:
        call()
    except UpdateError as error:
        return f"{error.kind}: {error} {error.details}"
    return ""


def bad_input(weights: Client, late: dict[str, Tensor]) -> Facts:
    """A tensor that is not finite, and one that does not come, are refused by name, and nothing changes."""
    before = weights.digests()
    matrices = [name for name, tensor in late.items() if tensor.dim() > 1 and "embed" not in name]
    name = sorted(matrices)[len(matrices) // 2]
    broken = {**late, name: late[name].clone()}
    broken[name].view(-1)[7] = math.nan
    facts: Facts = {"NaN refused by name": name in refusal(lambda: weights.push(broken))}
    lacking = {key: late[key] for key in late if key != name}
    facts["missing refused by name"] = name in refusal(lambda: weights.push(lacking))
    facts["untouched by refusals"] = weights.digests() == before
    return facts


def partial(weights: Client, late: dict[str, Tensor]) -> None:
    """Send a checkpoint layer by layer, what is in none at last: parts of fused matrices come together."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in late.items():
        layer = re.search(r".*\.layers\.\d+\.", name)
        layers.setdefault(layer[0] if layer else "", {})[name] = tensor
    for layer in sorted(layers, reverse=True):
        part = layers[layer]
        try:
            weights.push(part, partial=True, base_epoch=weights.weights().epoch)
        except UpdateError as error:
            if "brings nothing" not in str(error):  # it is of a tower that this engine has not
                raise
            left_open = weights.weights().update
            if left_open:
                weights.abandon(left_open)


def same_floats(one: list[Any], other: list[Any]) -> bool:
    """The same tokens with bit-identical log-probabilities."""
    same = [answer[:2] for answer in one] == [answer[:2] for answer in other]
    return same and all(math.isfinite(value) for answer in one for value in answer[1])


LONG = [5 + 7 * place % 90 for place in range(700)]
"""A prompt of several blocks of the cache, whose states are cached, too."""
BESIDE = 450
"""Tokens of a request that runs during a commit."""


def beside(llm: LLM, push: Callable[[], Any]) -> list[Any]:
    """What a request says that runs while weights are pushed."""
    answers: list[Any] = []
    running = threading.Thread(target=lambda: answers.extend(sample(llm, [PROMPTS[1]], BESIDE)))
    running.start()
    time.sleep(0.5)
    push()
    running.join()
    return answers[0]


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(here - there) for here, there in zip(one, other, strict=True))


def states(llm: LLM, weights: Client, late: dict[str, Tensor], cold_long: list[Any]) -> Facts:
    """Cached states stay in their epoch; those of running requests are kept, or made anew, as the commit says.

    A request's first token by the new weights is the first one whose log-probability is another than without an update. With
    `recompute` it goes on as a new request does whose prompt has the tokens so far; with `keep`, from older states, not so.
    """
    # vLLM may cache states only where a second request has begun alike
    cold, _, again = (sample(llm, [LONG]) for _ in range(3))
    cached = llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    print("found in the cache:", cold[0][2], again[0][2], flush=True)
    facts: Facts = {"states are cached": not cold[0][2] and again[0][2] > 0} if cached else {}
    alone = sample(llm, [PROMPTS[1]], BESIDE)[0]
    off: dict[str, float] = {}
    for running in ("recompute", "keep"):
        ids, logprobs, _ = beside(llm, lambda running=running: weights.push(late, running=running))
        before = next(place for place in range(BESIDE) if logprobs[place] != alone[1][place])
        (after,) = sample(llm, [PROMPTS[1] + ids[:before]])
        off[running] = (
            distance(logprobs[before : before + 8], after[1]) if ids[before:][:8] == after[0] else 9.0
        )
        facts[f"{running} during a request"] = 0 < before < BESIDE - 8
        if running == "recompute":
            found = sample(llm, [LONG])
            facts["cached states stay in their epoch"] = not found[0][2] and same_floats(found, cold_long)
        weights.rollback()
        found = sample(llm, [LONG])
        facts["cached states do not come back"] = not found[0][2] and same_floats(found, cold)
    facts["recompute makes states anew"] = off["recompute"] < 0.05
    facts["keep goes on from older states"] = off["keep"] > off["recompute"]
    print("log-probabilities off by", off, flush=True)
    return facts


def row(family: Family, folder: Path, facts: Facts) -> None:
    """One family: started, updated, compared with a cold start, rolled back, sent bad input and parts."""
    early, late = folder / f"{family.name}-early", folder / f"{family.name}-late"
    family.write(early, 0)
    family.write(late, 1)
    torch.manual_seed(2)
    cold_llm = engine_on(late, family)
    try:
        cold = sample(cold_llm)
        cold_long, cold_images = sample(cold_llm, [LONG]), see(cold_llm, family)
    finally:
        cold_llm.llm_engine.engine_core.shutdown()
    del cold_llm
    llm = engine_on(early, family)
    try:
        with embedded_blocking(llm) as weights:
            manifest = Manifest.from_dict(weights.manifest())
            tensors = dict(stored(late))
            expected = checkpoint_digests(late, manifest)
            facts["started"] = weights.digests().digests == checkpoint_digests(early, manifest)
            begun, images = sample(llm), see(llm, family)
            if images:
                facts["images are seen"] = images[0] != images[1] and same_floats(images[:1], images[2:])
            facts["generates"] = same_floats(begun, sample(llm)) and begun != cold
            facts |= bad_input(weights, tensors)
            facts["served as before"] = same_floats(begun, sample(llm))
            weights.push(tensors, version="late")
            facts["digests of a cold start"] = weights.digests().digests == expected
            facts["floats of a cold start"] = same_floats(cold, sample(llm))
            if images:
                facts["images of a cold start"] = same_floats(cold_images, see(llm, family))
            weights.rollback()
            facts["rolled back"] = same_floats(begun, sample(llm)) and same_floats(images, see(llm, family))
            if family.kind == HYBRID:
                facts |= states(llm, weights, tensors, cold_long)
            partial(weights, tensors)
            facts["partial"] = weights.digests().digests == expected and same_floats(cold, sample(llm))
    finally:
        llm.llm_engine.engine_core.shutdown()


def outcome(family: Family, folder: Path) -> Facts:
    """The facts of a row, or the last line of what ended it."""
    facts: Facts = {}
    try:
        row(family, folder, facts)
        return {"facts": facts}
    except BaseException as error:
        traceback.print_exc()
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return {"facts": facts, "error": f"{type(cause).__name__}: {cause}"}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.write_text(json.dumps({name: outcome(ZOO[name], out.parent) for name in sys.argv[2:]}))

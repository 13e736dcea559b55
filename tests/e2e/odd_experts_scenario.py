# SPDX-License-Identifier: Apache-2.0
"""Serves and updates families of `odd_experts`, one after the other. Takes a file, to which it writes what it saw, as JSON,
and the families' names."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
from odd_experts import LAYOUTS, write, write_mxfp4
from vllm import LLM, SamplingParams

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests

Facts = dict[str, Any]
PROMPTS = [[5, 6, 7], [9 + (7 * place) % 100 for place in range(40)]]


def engine_on(folder: Path, ranks: int) -> LLM:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "auto" if ranks == 1 else "0|1"
    return LLM(
        model=str(folder),
        quantization="blockfp8",
        max_model_len=128,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
        limit_mm_per_prompt={"image": 0, "video": 0},
        tensor_parallel_size=ranks,
        distributed_executor_backend="uni" if ranks == 1 else "mp",
    )


def sample(llm: LLM) -> list[Any]:
    """Of each prompt alone: itself, and the token ids and log-probabilities that the engine goes on with, greedily."""
    wanted = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    found = []
    for prompt in PROMPTS:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)
        ids = list(output.outputs[0].token_ids)
        steps = zip(ids, output.outputs[0].logprobs or [], strict=True)
        found.append([prompt, ids, [step[token].logprob for token, step in steps]])
    return found


def refusal(call: Callable[[], Any]) -> list[Any]:
    """With what kind a call is refused, and the tensors that are named."""
    try:
        call()
    except UpdateError as error:
        problems = error.details.get("problems") or []
        return [error.kind, sorted({str(problem.get("tensor")) for problem in problems})]
    return []


def cold(folder: Path, ranks: int) -> list[Any]:
    llm = engine_on(folder, ranks)
    try:
        return sample(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


def scenario(family: str, folder: Path) -> Facts:
    """Served from `early`, of gpt-oss in MXFP4; updated to `late`, as transformers has it and as the checkpoint does."""
    early, late, layout = folder / "early", folder / "late", LAYOUTS.get(family)
    write(family, early, 0)
    tensors = write(family, late, 1)
    served = early
    ranks = 2 if family.endswith("two ranks") else 1
    if family.startswith("gpt-oss"):
        served = folder / "mxfp4"
        write_mxfp4(early, served)
    facts: Facts = {"cold": cold(late, ranks)}
    llm = engine_on(served, ranks)
    try:
        with embedded_blocking(llm) as weights:
            manifest = Manifest.from_dict(weights.manifest())
            first, last = (checkpoint_digests(path, manifest, expert_layout=layout) for path in (early, late))
            facts["started"] = weights.digests().digests == first
            facts["quantized"] = sorted(
                name for name, pieces in manifest.pieces.items() if any(piece.quantized for piece in pieces)
            )
            facts["early"] = sample(llm)
            weights.push(tensors, version="late", expert_layout=layout)
            facts["digests"] = weights.digests().digests == last
            facts["late"] = sample(llm)
            weights.rollback()
            facts["rolled back"] = sample(llm)
            sent = dict(stored(late))
            name = max(name for name in sent if "experts" in name or "output_linear" in name)
            broken = {**sent, name: torch.full_like(sent[name], torch.nan)}
            facts["NaN"] = [name, *refusal(lambda: weights.push(broken, expert_layout=layout))]
            if layout:
                facts["not told"] = refusal(lambda: weights.push(sent))
            facts["untouched"] = weights.digests().digests == first
            part, epoch = {name: sent[name]}, weights.weights().epoch
            beside = manifest.completed(part)
            part = {key: sent[key] for key in beside}
            weights.push(part, partial=True, base_epoch=epoch, expert_layout=layout)
            found = weights.digests().digests
            facts["partial"] = all(found[key] == (last if key in part else first)[key] for key in found)
            weights.push(sent, expert_layout=layout)
            facts["as the checkpoint has it"] = weights.digests().digests == last and sample(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
    return facts


if __name__ == "__main__":
    out = Path(sys.argv[1])
    found = {}
    for family in sys.argv[2:]:
        folder = out.parent / family.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        found[family] = scenario(family, folder)
    out.write_text(json.dumps(found))

# SPDX-License-Identifier: Apache-2.0
"""One engine that replays CUDA graphs over weights that vLLM derives or multiplies by its own kernels.

latent_scenario.py ROLE FOLDER OPTIONS: the folder has the checkpoints `early` and `late`; the options are an engine's, as
JSON. `cold` starts on the late one; `live` starts on the early one, is updated and rolled back. Each writes what it saw to
FOLDER/ROLE.json.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

from vllm import LLM, SamplingParams

from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.serve.schema import KvScales
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests

LENGTHS = 60, 190, 700
"""Of prompts: backends of latent attention differ in which of them they take as they take tokens that are decoded."""
PROMPTS = [[3 + (5 * place + 7 * row) % 100 for place in range(count)] for row, count in enumerate(LENGTHS)]
TOKENS = 1024
"""Of a request, and of a step."""


def say(text: str) -> None:
    """Tell the log when this began."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def engine_on(folder: Path, options: dict[str, Any]) -> LLM:
    say(f"start on {folder.name}")
    return LLM(
        str(folder),
        quantization="blockfp8",
        max_model_len=TOKENS,
        max_num_batched_tokens=TOKENS,
        kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        max_num_seqs=4,
        enable_prefix_caching=False,
        **options,
    )


def sample(llm: LLM) -> list[Any]:
    """Token ids and log-probabilities, greedily, one request at a time."""
    wanted = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    found = []
    for prompt in PROMPTS:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)
        ids = list(output.outputs[0].token_ids)
        steps = zip(ids, output.outputs[0].logprobs or [], strict=True)
        found.append([ids, [step[token].logprob for token, step in steps]])
    return found


def cold(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    llm = engine_on(folder / "late", options)
    say("sample")
    facts: dict[str, Any] = {"cold": sample(llm)}
    if "kv_cache_dtype" in options:
        with embedded_blocking(llm) as weights:
            facts["scales"] = weights.kv_scales().scales
    llm.llm_engine.engine_core.shutdown()
    return facts


def live(folder: Path, options: dict[str, Any], layout: str | None, *, provided: bool) -> dict[str, Any]:
    """`provided`: the engine starts with scales of 1, and the update brings those of the cold start."""
    llm = engine_on(folder / "early", options)
    with embedded_blocking(llm) as weights:
        say("sample")
        facts: dict[str, Any] = {"early": sample(llm)}
        scales = KvScales(policy="provided", scales=scales_of(folder)) if provided else None
        say("update")
        weights.push(dict(stored(folder / "late")), version="late", expert_layout=layout, kv_scales=scales)
        manifest = Manifest.from_dict(weights.manifest())
        expected = checkpoint_digests(folder / "late", manifest, expert_layout=layout)
        facts["digests"] = weights.digests().digests == expected
        if "kv_cache_dtype" in options:
            facts["scales"] = weights.kv_scales().scales
        say("sample")
        facts["late"] = sample(llm)
        say("roll back")
        weights.rollback()
        facts["rolled back"] = sample(llm)
    llm.llm_engine.engine_core.shutdown()
    return facts


def scales_of(folder: Path) -> dict[str, Any]:
    """Return what the cold start computed, once it has."""
    file = folder / "cold.json"
    while not file.exists():
        time.sleep(1)
    scales = json.loads(file.read_text())["scales"]
    return {layer: {kind: values[0] for kind, values in kinds.items()} for layer, kinds in scales.items()}


def main(role: str, folder: Path, options: dict[str, Any]) -> None:
    layout, provided = options.pop("expert_layout", None), options.pop("provided", False)
    if role == "cold":
        facts = cold(folder, options)
    else:
        if provided:
            options["additional_config"]["fp8ext"]["kv_scales"] = "provided"
        facts = live(folder, options, layout, provided=provided)
    whole = folder / f"{role}.part"
    whole.write_text(json.dumps(facts))
    whole.rename(folder / f"{role}.json")
    say("done")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))

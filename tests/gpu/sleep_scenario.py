# SPDX-License-Identifier: Apache-2.0
"""An engine that gives its GPU memory to a trainer and takes it back, at both levels; writes what it saw.

sleep_scenario.py FOLDER FACTS
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

import torch
from vllm import LLM, SamplingParams

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.transports.wire import stored

CONTEXT = 6000
"""Tokens of the first prompts: three of them are enough for our attention kernel to take them beside another prompt."""
PROMPTS = (CONTEXT, CONTEXT + 17, CONTEXT + 5, 300, 40, 700)
OUTPUTS = (24, 20, 22, 4, 9, 5)
SCALES = {"policy": "calibrate", "prompts": [[3 + 7 * index % 50_000 for index in range(1000)]]}
"""By the same tokens at start and at an update: the same scales."""
TAKEN = 2 << 30
"""Bytes that the trainer writes while the engine sleeps: what comes back is not what was."""


def main(folder: str, facts: str) -> None:
    llm = LLM(
        folder,
        quantization="blockfp8",
        kv_cache_dtype="fp8",
        max_model_len=8192,
        max_num_seqs=4,
        kv_cache_memory_bytes=3 << 30,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enable_sleep_mode=True,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
        additional_config={"fp8ext": {"kv_scales": SCALES, "kernels": {"graph_tokens": 512}}},
    )
    seen: dict[str, Any] = {}
    with embedded_blocking(llm) as weights:
        cold, scales = weights.digests(), weights.kv_scales().scales
        seen["cold"], seen["beside"] = sampled(llm), beside(llm)
        for level in (1, 2):
            before = free()
            llm.sleep(level)
            seen[f"given at level {level}"] = free() - before
            trainer = torch.full((TAKEN,), 0x7F, dtype=torch.uint8, device="cuda")
            seen[f"refused at level {level}"] = kind(weights)
            del trainer
            torch.cuda.empty_cache()
            llm.wake_up(["weights"] if level == 2 else None)
            seen[f"state after level {level}"] = weights.weights().state
            if level == 2:  # trainers wake the weights, bring new ones, and then wake the KV cache
                weights.push(dict(stored(Path(folder))), transport="ipc", version="again")
                llm.wake_up(["kv_cache"])
            seen[f"verified after level {level}"] = weights.verify().version
            digests = weights.digests()
            seen[f"digests after level {level}"] = digests.digests == cold.digests
            seen[f"scales after level {level}"] = weights.kv_scales().scales == scales
            seen[f"addresses after level {level}"] = digests.addresses == cold.addresses
            seen[f"sampled after level {level}"] = sampled(llm)
            seen[f"beside after level {level}"] = beside(llm)
    Path(facts).write_text(json.dumps(seen))


def sampled(llm: LLM) -> list[list[int]]:
    """Each prompt alone: what it is computed beside changes bits."""
    return [row for index in range(len(PROMPTS)) for row in _generated(llm, [index])]


def beside(llm: LLM) -> list[int]:
    """First tokens of more prompts than are served at once: the later ones begin beside others that decode."""
    return [row[0] for row in _generated(llm, range(len(PROMPTS)))]


def _generated(llm: LLM, indices: Sequence[int]) -> list[list[int]]:
    prompts: Any = [
        {"prompt_token_ids": [5 + (7 * at + 13 * index) % 5000 for at in range(PROMPTS[index])]}
        for index in indices
    ]
    wanted = [
        SamplingParams(temperature=0.0, max_tokens=OUTPUTS[index], ignore_eos=True, detokenize=False)
        for index in indices
    ]
    outputs = llm.generate(prompts, wanted, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def kind(weights: Client) -> str | None:
    try:
        weights.open()
    except UpdateError as error:
        return error.kind
    return None


def free() -> int:
    return torch.cuda.mem_get_info()[0]


if __name__ == "__main__":
    main(*sys.argv[1:])

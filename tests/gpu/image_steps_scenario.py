# SPDX-License-Identifier: Apache-2.0
"""An engine of a model that sees images, asked with and without them; writes what it saw.

image_steps_scenario.py MODE FOLDER FACTS

`ours`: steps with prompts of text alone replay one CUDA graph, and steps of the requests of the step before are prepared by
one launch. `plain`: by vLLM.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from vllm_fp8ext.compat.speed import decode_prefill_split, decode_step_reuse

IMAGE, VISION_START, VISION_END = 100, 102, 103
TOKENS = 30
REQUESTS = 12


def main(mode: str, folder: str, facts: str) -> None:
    seen: dict[str, Any] = {"followed": 0, "whole": 0}
    again, replay = decode_step_reuse.PreviousStep.again, ModelCudaGraphManager.run_fullgraph

    def followed(self: decode_step_reuse.PreviousStep, runner: Any) -> Any:
        seen["followed"] += 1
        return again(self, runner)

    def replayed(self: ModelCudaGraphManager, desc: Any) -> Any:
        seen["whole"] += desc.max_query_len is not None
        return replay(self, desc)

    decode_step_reuse.PreviousStep.again = followed  # type: ignore[method-assign]  # looked at on its way
    ModelCudaGraphManager.run_fullgraph = replayed  # type: ignore[method-assign]
    decode_prefill_split.LEAST_TOKENS = 0  # the same kernel decodes in both modes
    ours = mode == "ours"
    llm = LLM(
        folder,
        quantization="blockfp8",
        kv_cache_dtype="fp8",
        max_model_len=1024,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.1,
        max_num_seqs=32,
        enable_prefix_caching=False,
        async_scheduling=False,  # the same steps in both modes
        limit_mm_per_prompt={"image": 2, "video": 0},
        additional_config={
            "fp8ext": {
                "kv_scales": {"policy": "static", "default": 1.0},
                "kernels": {"decode_step_reuse": ours, "mixed_full_cudagraph": ours, "graph_tokens": 1024},
            }
        },
    )
    for name, images in (("text", 0), ("images", 1), ("both", 2)):
        before = seen["followed"], seen["whole"]
        seen[name] = answers(llm, images)
        seen[f"{name}, ours"] = [seen["followed"] - before[0], seen["whole"] - before[1]]
    Path(facts).write_text(json.dumps(seen))


def answers(llm: LLM, images: int) -> list[list[int]]:
    """Tokens of requests that come one in a step. `images`: in none of them, in all, or (2) in every second one."""
    engine, done = llm.llm_engine, {}
    for index in range(REQUESTS):
        prompt: dict[str, Any] = {"prompt_token_ids": [4 + (7 * index + place) % 90 for place in range(20)]}
        if images and index % images == 0:
            prompt["prompt_token_ids"] += [VISION_START, IMAGE, VISION_END, 5, 6]
            prompt["multi_modal_data"] = {"image": picture(index)}
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        engine.add_request(f"{index}", prompt, sampling)
        for one in engine.step():
            done[one.request_id.split("-")[0]] = one
    while engine.has_unfinished_requests():
        for one in engine.step():
            done[one.request_id.split("-")[0]] = one
    return [list(done[f"{index}"].outputs[0].token_ids) for index in range(REQUESTS)]


def picture(index: int) -> Image.Image:
    """Noise of 56 x 84 pixels."""
    values = np.random.default_rng(index).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    return Image.fromarray(values)


if __name__ == "__main__":
    main(*sys.argv[1:])

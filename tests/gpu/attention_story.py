# SPDX-License-Identifier: Apache-2.0
"""An engine whose decoding steps attend by our own kernel; writes what it saw.

attention_story.py eager|graphs|flash FOLDER FACTS

`eager` compares each call with the same in fp64 over the live cache. `flash`: with vLLM's own kernel.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from torch import Tensor
from vllm import LLM, SamplingParams

from vllm_fp8ext.kernels.decode_attention import DecodeAttention, Step, decode_attention_reference
from vllm_fp8ext.kernels.kv_cache import quantize
from vllm_fp8ext.kernels.reference import FP8_DTYPE

PROMPTS = [range(5, 5 + count) for count in (3, 40, 700, 15, 16, 17)]
TOKENS = 24


def main(mode: str, folder: str, facts: str) -> None:
    seen: dict[str, Any] = {"calls": 0, "error": 0.0, "joined": True}
    original = DecodeAttention.__call__

    def watched(self: DecodeAttention, step: Step, out: Tensor) -> None:
        original(self, step, out)
        seen["calls"] += 1
        if mode == "eager" and seen["calls"] % 7 == 1:
            _compare(seen, step, out)

    DecodeAttention.__call__ = watched  # type: ignore[method-assign]  # looked at on its way
    llm = LLM(
        folder,
        quantization="blockfp8",
        kv_cache_dtype="fp8",
        max_model_len=1024,
        enforce_eager=mode == "eager",
        kv_cache_memory_bytes=512 << 20,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        max_num_seqs=16,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
        additional_config={
            "fp8ext": {"kv_scales": "calibrate", "kernels": {"decode_attention": mode != "flash"}}
        },
    )
    seen["at start"] = seen["calls"]
    # the next token is given, so that every mode reads the same
    params = [
        SamplingParams(
            max_tokens=TOKENS - index, ignore_eos=True, logprobs=0, allowed_token_ids=[100 + index]
        )
        for index in range(len(PROMPTS))
    ]
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], params)
    logprobs = [[next(iter(step.values())).logprob for step in out.outputs[0].logprobs] for out in outputs]
    Path(facts).write_text(json.dumps({**seen, "logprobs": logprobs}))


def _compare(seen: dict[str, Any], step: Step, out: Tensor) -> None:
    query, key, value, cache, table, lengths, slots, scales, softmax_scale = step
    count, codes = len(lengths), cache.view(FP8_DTYPE)
    rows = [row for row, length in enumerate(lengths.tolist()) if length]
    expected = decode_attention_reference(
        query[rows], codes, table[:count][rows], lengths[rows], scales, softmax_scale
    )
    error = (out[rows] - expected).norm() / expected.norm()
    seen["error"] = max(seen["error"], float(error.nan_to_num(nan=1e9)))
    for row in rows:
        slot, size = int(slots[row]), cache.shape[2]
        if slot < 0:
            continue
        parts = zip((key, value), scales[1:], strict=True)
        fresh = torch.cat([quantize(part[row : row + 1].float(), scale)[0] for part, scale in parts], -1)
        there = codes[slot // size, :, slot % size]
        seen["joined"] &= torch.equal(there.view(torch.uint8), fresh.view(torch.uint8))


if __name__ == "__main__":
    main(*sys.argv[1:])

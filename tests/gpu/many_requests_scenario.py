# SPDX-License-Identifier: Apache-2.0
"""An engine in which many requests begin while others decode, one of them a long one; writes what it saw.

many_requests_scenario.py MODE FOLDER FACTS

`whole`: steps with prompts replay one CUDA graph. `pieces`: they replay graphs that are broken at attention. `eager`: none.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from vllm_fp8ext.compat.speed import decode_prefill_split
from vllm_fp8ext.compat.warmup.compilations import counts

LONG = 4500
"""Tokens of the first prompt: more than FlashAttention may have in a graph."""
REQUESTS = 220
AT_ONCE = 8
TOKENS = 40
WORDS = 500
"""Different tokens."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    *({"logprobs": count} for count in (1, 2, 4, 8, 15, 16, 20)),
)
"""Of requests that come one by one: each number of log-probabilities that is compiled apart."""


def main(mode: str, folder: str, facts: str) -> None:
    seen: dict[str, Any] = {"whole": []}
    replay = ModelCudaGraphManager.run_fullgraph

    def replayed(self: ModelCudaGraphManager, desc: Any) -> Any:
        if desc.max_query_len is not None:
            seen["whole"].append(desc.num_reqs)
        return replay(self, desc)

    ModelCudaGraphManager.run_fullgraph = replayed  # type: ignore[method-assign]  # looked at on its way
    decode_prefill_split.LEAST_TOKENS = 0  # the same kernel decodes in every mode
    llm = LLM(
        folder,
        quantization="blockfp8",
        kv_cache_dtype="fp8",
        max_model_len=LONG + 1000,
        enforce_eager=mode == "eager",
        kv_cache_memory_bytes=3 << 30,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        async_scheduling=False,  # the same steps in every mode
        additional_config={
            "fp8ext": {
                "kv_scales": "calibrate",
                "kernels": {"graph_tokens": 1024, "mixed_full_cudagraph": mode == "whole"},
            }
        },
    )
    seen["compiled before"] = counts()
    for sampling in SAMPLING:
        params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False, **sampling)
        llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    seen["whole"].clear()
    seen["logprobs"] = many_requests(llm, LONG, REQUESTS, AT_ONCE, TOKENS)
    Path(facts).write_text(json.dumps({**seen, "compiled after": counts()}))


def many_requests(llm: LLM, long: int, count: int, at_once: int, tokens: int) -> list[list[float]]:
    """A prompt of `long` tokens, which goes on until all others are done, and `count` short ones, `at_once` in each step."""
    engine = llm.llm_engine
    finished = []
    steps = count // at_once + tokens
    _begin(engine, 0, long, steps)
    engine.step()
    for index in range(count):
        _begin(engine, index + 1, 10 + 7 * index % 60, tokens)
        if index % at_once == at_once - 1:
            finished += [output for output in engine.step() if output.finished]
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    finished.sort(key=lambda output: int(output.request_id.split("-")[0]))
    return [[next(iter(step.values())).logprob for step in out.outputs[0].logprobs] for out in finished]


def _begin(engine: Any, index: int, count: int, tokens: int) -> None:
    """With a prompt of its own; the next token is given, so that every mode reads the same."""
    prompt = [(11 * index + 3 * place) % WORDS for place in range(count)]
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, logprobs=0, allowed_token_ids=[index % WORDS], detokenize=False
    )
    engine.add_request(f"{index}", {"prompt_token_ids": prompt}, params)


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""An engine whose requests decode together, come and go, with any sampling; writes what it saw.

steady_scenario.py MODE FOLDER FACTS

`steady`: a step of the requests of the step before is prepared by one launch, and sampled by a CUDA graph. `async`: and is
scheduled before the one ahead has ended. `unsampled`: and its logits are computed by what no CUDA graph can hold. `plain`: by
vLLM.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_fp8ext.compat.speed import decode_step_reuse, sampling_cudagraph
from vllm_fp8ext.compat.warmup.compilations import counts

TOGETHER = 1, 2, 3, 8, 13
"""Requests at once."""
TOKENS = 40
REQUESTS = 32
"""More requests than the KV cache has room for."""
ABORTED = 3
WORDS = 500
"""Different tokens of prompts."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.7, "logprobs": 0},
    {"temperature": 1.0, "logprobs": 4},
    {"temperature": 1.0, "presence_penalty": 0.5},
    {"temperature": 0.0, "min_tokens": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
)


def main(mode: str, folder: str, facts: str) -> None:
    seen: dict[str, Any] = {"followed": 0, "sampled": 0, "preempted": 0}
    again, sample = decode_step_reuse.PreviousStep.again, sampling_cudagraph.Samplers.sample
    preempt = Scheduler._preempt_request

    def followed(self: decode_step_reuse.PreviousStep, runner: Any) -> Any:
        seen["followed"] += 1
        return again(self, runner)

    def sampled(self: sampling_cudagraph.Samplers, runner: Any, batch: Any) -> Any:
        result = sample(self, runner, batch)
        seen["sampled"] += result is not None
        return result

    def preempted(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        seen["preempted"] += 1
        preempt(self, *args, **kwargs)

    Scheduler._preempt_request = preempted  # type: ignore[method-assign]  # looked at on its way
    decode_step_reuse.PreviousStep.again = followed  # type: ignore[method-assign]  # looked at on its way
    sampling_cudagraph.Samplers.sample = sampled  # type: ignore[method-assign]
    _pad_output_layer(waits=mode == "unsampled")
    llm = LLM(
        folder,
        quantization="blockfp8",
        kv_cache_dtype="fp8",
        max_model_len=1000,
        kv_cache_memory_bytes=90 << 20,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        async_scheduling=mode == "async",
        additional_config={
            "fp8ext": {
                "kv_scales": {"policy": "static", "default": 1.0},
                "kernels": {"decode_step_reuse": mode != "plain"},
            }
        },
    )
    seen["compiled before"] = counts()
    seen["answers"] = [
        answer for count in TOGETHER for sampling in SAMPLING for answer in together(llm, count, [sampling])
    ]
    seen["alike"] = {"followed": seen["followed"], "sampled": seen["sampled"]}
    seen["answers"] += together(llm, REQUESTS, SAMPLING, come=2)
    Path(facts).write_text(json.dumps({**seen, "compiled after": counts()}))


def _pad_output_layer(*, waits: bool) -> None:
    """To 32 rows, in every mode: cuBLAS takes kernels by how many there are, and then bits differ. `waits`: for the GPU."""
    compute = Qwen3ForCausalLM.compute_logits

    def padded(self: Any, states: torch.Tensor) -> torch.Tensor:
        rows = states.new_zeros(max(32, states.shape[0]), states.shape[1])
        rows[: states.shape[0]] = states
        if waits:
            rows.sum().item()
        logits: torch.Tensor = compute(self, rows)
        return logits[: states.shape[0]]

    Qwen3ForCausalLM.compute_logits = padded  # type: ignore[method-assign]


def together(llm: LLM, count: int, samplings: Any, come: int = 0) -> list[Any]:
    """Tokens and their log-probabilities of requests that decode together, `come` of them in each step, or all in the
    first; where they come one after the other, they end so."""
    engine = llm.llm_engine
    finished: list[Any] = []
    for index in range(count):
        prompt = [(11 * index + 3 * place) % WORDS for place in range(5 + 37 * index % 90)]
        sampling = {
            "seed": index,
            "max_tokens": TOKENS - index * bool(come),
            **samplings[index % len(samplings)],
        }
        params = SamplingParams(ignore_eos=True, detokenize=False, **sampling)
        engine.add_request(f"{index}", {"prompt_token_ids": prompt}, params)
        if come and index % come == 0:
            finished += engine.step()
        if come and index == 2 * ABORTED:
            engine.abort_request([f"{ABORTED}"])
    while engine.has_unfinished_requests():
        finished += engine.step()
    done = {int(one.request_id.split("-")[0]): one.outputs[0] for one in finished if one.finished}
    return [
        [
            list(done[index].token_ids),
            [{token: told.logprob for token, told in step.items()} for step in done[index].logprobs or []],
        ]
        for index in sorted(done)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])

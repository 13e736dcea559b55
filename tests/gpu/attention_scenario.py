# SPDX-License-Identifier: Apache-2.0
"""An engine whose decoding steps attend by our own kernel; writes what it saw.

attention_scenario.py MODE FOLDER FACTS

`eager` and `plain eager` compare calls with the same in fp64 over the live cache. `longer`: with graphs for steps with
prompts too, broken at attention. `short`: with such of whole steps, but for prompts of more than `SHORT` tokens. `pieces`:
with graphs that are broken at attention, and not where vLLM caches. `whole`: with graphs of whole steps alone, those with
prompts too. `unquantized`: with outputs in BF16 throughout. `flash`: with vLLM's own kernel. `plain`, `plain eager`, `plain
flash`: over a cache in BF16.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import CompilationConfig
from vllm.v1.attention.backends import flash_attn

from vllm_fp8ext.compat.speed import decode_prefill_split, decode_step_reuse
from vllm_fp8ext.kernels.attention.decode_attention import (
    AttentionKind,
    DecodeAttention,
    DecodeStep,
    decode_attention_reference,
)
from vllm_fp8ext.kernels.attention.kv_cache import quantize
from vllm_fp8ext.kernels.gemm.registry import GEMM_KERNELS
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE

PROMPTS = [range(5, 5 + count) for count in (3, 40, 700, 15, 16, 17)]
TOKENS = 24
SHORT = 250
BLOCK = 16
NEXT = 99
"""The token that follows in the last prompts."""
LENT = 2
"""Their blocks."""
PIECES: dict[str, dict[str, Any]] = {
    "pieces": {
        "cudagraph_mode": "PIECEWISE",
        "splitting_ops": list(CompilationConfig._attention_ops),
    },
    "whole": {"cudagraph_mode": "FULL"},
}


def main(mode: str, folder: str, facts: str) -> None:
    seen: dict[str, Any] = {
        "calls": 0,
        "mixed": 0,
        "error": 0.0,
        "joined": True,
        "lent": 0,
        "quantized": 0,
        "cached by vLLM": [],
        "scheduled": [],
        "launched": 0,
        "reused": 0,
    }
    plain = mode.startswith("plain")
    original, cache = DecodeAttention.__call__, flash_attn.reshape_and_cache_flash
    schedule = flash_attn.get_scheduler_metadata

    def scheduled(**asked: Any) -> Tensor:
        seen["scheduled"].append(asked["max_seqlen_q"])
        return schedule(**asked)

    flash_attn.get_scheduler_metadata = scheduled

    def cached(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any) -> None:
        seen["cached by vLLM"].append(len(rest[0]))
        cache(key, value, key_cache, value_cache, *rest)

    flash_attn.reshape_and_cache_flash = cached

    def watched(self: DecodeAttention, step: DecodeStep, out: Tensor | Quantized, *form: Any) -> None:
        original(self, step, out, *form)
        seen["quantized"] += isinstance(out, Quantized)
        seen["calls"] += 1
        seen["mixed"] += step.slots_R is None
        if mode.endswith("eager") and (
            _borrows(seen, step) or step.slots_R is None or seen["calls"] % 7 == 1
        ):
            _compare(seen, step, out, self.kind)

    again = decode_step_reuse.PreviousStep.again

    def reused(self: decode_step_reuse.PreviousStep, runner: Any) -> Any:
        seen["reused"] += 1
        return again(self, runner)

    decode_step_reuse.PreviousStep.again = reused  # type: ignore[method-assign]  # counted on its way
    decode_prefill_split.LEAST_TOKENS = 0
    if mode == "short":
        decode_prefill_split.SHORT = SHORT
    DecodeAttention.__call__ = watched  # type: ignore[method-assign]  # looked at on its way
    llm = LLM(
        folder,
        quantization="blockfp8",
        kv_cache_dtype="auto" if plain else "fp8",
        max_model_len=1024,
        enforce_eager=mode.endswith("eager"),
        kv_cache_memory_bytes=512 << 20,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        max_num_seqs=6 if mode == "whole" else 16,
        block_size=BLOCK,
        async_scheduling=False,  # the scheduler knows tokens, and so what completes a block, before they are computed
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8], **PIECES.get(mode, {})},
        additional_config={
            "fp8ext": {
                **({} if plain else {"kv_scales": "calibrate"}),
                "kernels": {
                    "decode_attention": "flash" not in mode and "all",
                    "quantized_attention": mode != "unquantized",
                    "graph_tokens": 1024 if mode in ("longer", "short") else 0,
                    "mixed_full_cudagraph": mode != "longer",
                },
            }
        },
    )
    seen["at start"], seen["mixed"], seen["cached by vLLM"] = seen["calls"], 0, []
    kernel = GEMM_KERNELS["deep_gemm"]

    def launched(*given: Any) -> Tensor:
        seen["launched"] += 1
        return kernel.run(*given)

    GEMM_KERNELS["deep_gemm"] = replace(kernel, run=launched)
    # the next token is given, so that every mode reads the same
    params = [
        SamplingParams(
            max_tokens=TOKENS - index, ignore_eos=True, logprobs=0, allowed_token_ids=[100 + index]
        )
        for index in range(len(PROMPTS))
    ]
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], params)
    outputs += _lend(llm)
    outputs += _join(llm)
    logprobs = [[next(iter(step.values())).logprob for step in out.outputs[0].logprobs] for out in outputs]
    Path(facts).write_text(json.dumps({**seen, "logprobs": logprobs}))


def _lend(llm: LLM) -> list[RequestOutput]:
    """One request completes its second block in the step in which another begins that has both blocks."""
    engine, finished = llm.llm_engine, []
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0, allowed_token_ids=[NEXT])
    upto = LENT * BLOCK
    known = list(range(150, 144 + upto))
    engine.add_request("lender", {"prompt_token_ids": known}, params)
    for _ in range(upto - len(known)):  # the last of these gives the token that completes the block
        engine.step()
    engine.add_request(
        "borrower", {"prompt_token_ids": [*known, *[NEXT] * (upto - len(known)), 5]}, params.clone()
    )
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    return sorted(finished, key=lambda output: output.request_id)


def _join(llm: LLM) -> list[RequestOutput]:
    """Requests that begin while others decode, one of them with more than `SHORT` tokens."""
    engine, finished = llm.llm_engine, []
    for index, count in enumerate((300, 5, 200, 4, 100)):
        params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0, allowed_token_ids=[200 + index])
        begin = 300 * (index + 1)  # no prompt has another one's blocks
        engine.add_request(f"{index}", {"prompt_token_ids": list(range(begin, begin + count))}, params)
        if index:  # the first two begin together
            finished += [output for output in engine.step() if output.finished]
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    return sorted(finished, key=lambda output: output.request_id)


def _borrows(seen: dict[str, Any], step: DecodeStep) -> bool:
    """Whether a request's context has a token that joins the cache in this step, not its own."""
    if step.slots_R is None:
        return False
    size, lengths = step.cache.shape[2], step.lengths_R.tolist()
    own = {int(slot) // size: row for row, slot in enumerate(step.slots_R.tolist()) if slot >= 0}
    matching = [
        block
        for row, length in enumerate(lengths)
        for block in step.table_RB[row, : -(-length // size)].tolist()
        if own.get(block, row) != row
    ]
    seen["lent"] += len(matching)
    return bool(matching)


def _compare(seen: dict[str, Any], step: DecodeStep, out: Tensor, kind: AttentionKind) -> None:
    query, key, value, cache, table, lengths, slots, scales, softmax_scale, sinks = step
    count, plain = len(lengths), cache.dtype == torch.bfloat16
    codes = cache if plain else cache.view(FP8_DTYPE)
    rows = [row for row, length in enumerate(lengths.tolist()) if length]
    expected = decode_attention_reference(
        query[rows], codes, table[:count][rows], lengths[rows], scales, softmax_scale, kind, sinks
    )
    error = (out[rows] - expected).norm() / expected.norm()
    seen["error"] = max(seen["error"], float(error.nan_to_num(nan=1e9)))
    for row in rows:
        size = cache.shape[2]
        last = int(lengths[row]) - 1
        slot = int(table[row, last // size]) * size + last % size if slots is None else int(slots[row])
        if slot < 0:
            continue
        parts = [part[row : row + 1] for part in (key, value)]
        if not plain:
            parts = [quantize(part.float(), scale) for part, scale in zip(parts, scales[1:], strict=True)]
        fresh = torch.cat(parts, -1)[0]
        there = codes[slot // size, :, slot % size]
        seen["joined"] &= torch.equal(there.view(torch.uint8), fresh.view(torch.uint8))


if __name__ == "__main__":
    main(*sys.argv[1:])

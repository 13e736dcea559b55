# SPDX-License-Identifier: Apache-2.0
"""A trainer that holds an `LLM` in its own process, whose calls block. Writes what it saw, as JSON, to a file."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

import torch
from torch import Tensor
from vllm import LLM, SamplingParams

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.transports.wire import stored

OPTIONS: dict[str, Any] = {
    "model": str(EARLY),
    "quantization": "blockfp8",
    "max_model_len": 2048,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_tokenizer_init": True,
}


def sample(llm: LLM, tokens: int = 16) -> list[int]:
    """Token ids that it goes on with, greedily."""
    wanted = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], wanted, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def kind(call: Callable[[], Any]) -> str | None:
    """Kind of the refusal of a call, if it was refused."""
    try:
        call()
    except UpdateError as error:
        return error.kind
    return None


def refusal(call: Callable[[], Any]) -> str | None:
    """What a call said that was refused for how things are set up."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


def merged(wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model that holds these values until the last one was yielded, and others then."""
    model = {name: tensor.clone() for name, tensor in wanted.items()}
    yield from model.items()
    for tensor in model.values():
        tensor.fill_(7.0)


def main(out: Path) -> None:
    llm = LLM(**OPTIONS)
    early, late = dict(stored(EARLY)), dict(stored(LATE))
    facts: dict[str, Any] = {}
    with embedded_blocking(llm) as weights:
        facts["cold"] = weights.digests().digests
        facts["sampled early"] = sample(llm)
        weights.push(late, version="late")
        facts["sampled late"] = sample(llm)
        facts["verified"] = weights.verify().epoch
        facts["session beside"] = refusal(lambda: embedded_blocking(llm).__enter__())
    with embedded_blocking(llm) as weights:
        facts["epoch in another session"] = weights.weights().epoch

        del late["model.norm.weight"]
        facts["incomplete"] = kind(lambda: weights.push(late))
        infinite = {**early, "model.norm.weight": early["model.norm.weight"] * torch.inf}
        facts["infinite"] = kind(lambda: weights.push(infinite))
        facts["sampled after refusals"] = sample(llm)

        beside: list[int] = []
        generating = threading.Thread(target=lambda: beside.extend(sample(llm, 900)))
        generating.start()
        weights.push(early)
        weights.rollback()
        weights.push(merged(early), chunk_bytes=1 << 16)
        facts["beside requests"] = (weights.weights().epoch, generating.is_alive())
        generating.join()
        facts["went on"] = len(beside)
        facts["digests again"] = weights.digests().digests
        facts["sampled early again"] = sample(llm)

        facts["no sleep over the routes"] = kind(weights.sleep)
        llm.sleep(1)
        facts["asleep"] = weights.weights().state
        facts["refused asleep"] = kind(weights.open)
        facts["awake"] = weights.wake().state
        facts["sampled awake"] = sample(llm)

        (process,) = llm.llm_engine.engine_core.resources.engine_manager.processes
        process.kill()
        facts["died"] = kind(lambda: weights.push(early))
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""A trainer that holds the engine in its own process: sample, train, update, and sample again.

    python examples/embedded.py MODEL

`embedded` gives the same update session as the server's routes do, without a network: complete or refused, tried on a canary,
committed between two steps on every rank, or not at all.
"""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_fp8ext.serve.client import AsyncClient
from vllm_fp8ext.serve.embedded import embedded
from vllm_fp8ext.update.transports.wire import stored

PROMPT = [1, 2, 3, 4]


async def sample(engine: AsyncLLM, name: str) -> list[int]:
    """Token ids that the engine goes on with, greedily."""
    sampling = SamplingParams(temperature=0.0, max_tokens=16, detokenize=False)
    tokens: list[int] = []
    async for output in engine.generate({"prompt_token_ids": PROMPT}, sampling, name):
        tokens = list(output.outputs[0].token_ids)
    return tokens


async def update(weights: AsyncClient, tensors: Mapping[str, Tensor], version: str) -> float:
    """Serve these BF16 tensors from the next step on; seconds that it took. Tensors on the engine's GPU are read where they
    are."""
    on_gpu = all(tensor.is_cuda for tensor in tensors.values())
    done = await weights.push(tensors, version=version, transport="ipc" if on_gpu else "http")
    return done.seconds["total"]


async def main(model: str) -> None:
    """Three steps of a training that adds a little noise."""
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=model, quantization="blockfp8", max_model_len=1024, gpu_memory_utilization=0.4)
    )
    async with embedded(engine) as weights:
        trained = dict(stored(Path(model)))
        print("step 0:", await sample(engine, "step-0"))
        for step in (1, 2, 3):
            for tensor in trained.values():
                tensor.add_(torch.randn_like(tensor), alpha=0.001)
            seconds = await update(weights, trained, f"step-{step}")
            print(f"step {step}: {await sample(engine, f'step-{step}')}, updated in {seconds:.2f} s")
    engine.shutdown()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"expected the folder of a checkpoint, found {sys.argv[1:]}")
    asyncio.run(main(sys.argv[1]))

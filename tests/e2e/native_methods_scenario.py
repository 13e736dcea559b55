# SPDX-License-Identifier: Apache-2.0
"""Weights come by the methods of `LLM`, or of `AsyncLLM`, as Ray actors call them. Writes what it saw, as JSON, to a file."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

from gloo_trainer import Beside, GlooGroup, open_trainer_endpoint, packed_broadcast_producer
from torch import Tensor
from vllm import LLM
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.embedded import embedded, embedded_blocking
from vllm_fp8ext.update.transports.wire import stored

OPTIONS: dict[str, Any] = {
    "model": str(EARLY),
    "quantization": "blockfp8",
    "max_model_len": 2048,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_tokenizer_init": True,
    "weight_transfer_config": {"backend": "nccl"},
}
BUCKET = 400_000


def init_info() -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    return {**address, "packed": True, "packed_buffer_size_bytes": BUCKET}


def update_info(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def send(group: GlooGroup, tensors: dict[str, Tensor]) -> None:
    packed_broadcast_producer(iter(tensors.items()), group, 0, lambda item: item[1], BUCKET)


def refusal(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except UpdateError as error:
        return error.kind
    return None


def blocking() -> dict[str, Any]:
    llm, late, facts = LLM(**OPTIONS), dict(stored(LATE)), {}
    facts["draft"] = refusal(llm.start_draft_weight_update)
    facts["too early"] = refusal(llm.finish_weight_update)
    info = init_info()
    with Beside(lambda: llm.init_weight_transfer_engine({"init_info": info})) as joined:
        group = open_trainer_endpoint(info)
    assert joined.result is None
    llm.start_weight_update()
    with Beside(lambda: llm.update_weights({"update_info": update_info(late)})) as received:
        send(group, late)
    assert received.result is None
    llm.finish_weight_update("late")
    facts["version"] = llm.get_weight_version()
    with embedded_blocking(llm) as weights:
        facts["digests"] = weights.digests().digests
        facts["epoch"] = weights.verify().epoch
        llm.update_weight_version("again")
        facts["renamed"] = weights.weights().version
    return facts


async def awaited() -> dict[str, Any]:
    engine, late, facts = AsyncLLM.from_engine_args(AsyncEngineArgs(**OPTIONS)), dict(stored(LATE)), {}
    async with embedded(engine) as weights:  # both ways in at once
        info = init_info()
        joining = asyncio.create_task(engine.init_weight_transfer_engine(WeightTransferInitRequest(info)))
        group = await asyncio.to_thread(open_trainer_endpoint, info)
        await joining
        await engine.start_weight_update()
        request = WeightTransferUpdateRequest(update_info(late))
        receiving = asyncio.create_task(engine.update_weights(request))
        await asyncio.to_thread(send, group, late)
        await receiving
        await engine.finish_weight_update("late")
        facts["version"] = await engine.get_weight_version()
        facts["digests"] = (await weights.digests()).digests
        facts["epoch"] = (await weights.verify()).epoch
        try:
            await engine.collective_rpc("update_weights", kwargs={"update_info": {}})
        except Exception as error:
            facts["of a worker"] = str(error)
    engine.shutdown()
    return facts


if __name__ == "__main__":
    told = blocking() if sys.argv[2] == "LLM" else asyncio.run(awaited())
    Path(sys.argv[1]).write_text(json.dumps(told))

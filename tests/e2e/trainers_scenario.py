# SPDX-License-Identifier: Apache-2.0
"""Trainers' own worker extensions bring weights to an `LLM`, driven as their trainers drive them.

Takes a file for what it saw, as JSON, the trainer's name, and the number of ranks.
"""

import asyncio
import base64
import contextlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # trainers send dtypes and handles in their calls
os.environ.setdefault("VERL_RAY_JOB_ID", str(os.getpid()))  # processes of the engine import this, too
sys.path.insert(0, str(Path(__file__).parent))

import torch
import zmq
from llm_scenario import OPTIONS, sample
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from trainer_packages import DEVICE, buckets, shared, uuid
from vllm import LLM
from vllm.platforms import current_platform

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests

Tensors = list[tuple[str, Tensor]]
Update = Callable[[LLM, Tensors], Any]
RANKS = int(sys.argv[3])
FOLDER = Path(sys.argv[1]).parent
GPU = torch.cuda.is_available()


def beside(call: Callable[[], Any], *senders: Callable[[], Any]) -> None:
    """Call the engine while trainers send."""
    with ThreadPoolExecutor(len(senders)) as pool:
        sending = [pool.submit(sender) for sender in senders]
        call()
        for each in sending:
            each.result(30)


def verl(llm: LLM, tensors: Tensors) -> None:
    import verl_worker  # noqa: F401
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

    async def items(weights: Any) -> Any:
        for each in weights:
            yield each

    sys.modules["verl.workers.rollout.utils"] = type(sys)("verl.workers.rollout.utils")
    sys.modules["verl.workers.rollout.utils"].ensure_async_iterator = items  # type: ignore[attr-defined]  # needs Ray

    def sender(rank: int) -> Callable[[], None]:
        job = os.environ["VERL_RAY_JOB_ID"]
        where = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-{rank}.sock"
        made = transfer.BucketedWeightSender(where, bucket_size_mb=1, use_shm=not GPU)

        def send() -> None:
            torch.cuda.set_device(rank) if GPU else None
            asyncio.run(made.async_send_weights(iter(tensors)))

        return send

    call = {"peft_config": None, "base_sync_done": False, "use_shm": not GPU}
    beside(
        lambda: llm.collective_rpc("update_weights_from_ipc", kwargs=call), *(sender(n) for n in range(RANKS))
    )


def openrlhf(llm: LLM, tensors: Tensors) -> None:
    path = FOLDER / "broadcast"
    llm.collective_rpc("join", args=(str(path),)) if not GPU else None
    for number, (name, tensor) in enumerate(tensors):
        last = number == len(tensors) - 1
        if GPU:
            # flat memory has no other shape: a trainer shares its parameters as they are
            kept = [tensor.bfloat16().to(f"cuda:{rank}") for rank in range(RANKS)]
            torch.cuda.synchronize()
            handles = {uuid(rank): reduce_tensor(kept[rank]) for rank in range(RANKS)}
            llm.collective_rpc(
                "update_weight_cuda_ipc", args=(name, torch.bfloat16, tensor.shape, handles, last)
            )
            continue
        shared(path, tensor.bfloat16())
        llm.collective_rpc("update_weight", args=(name, torch.bfloat16, tensor.shape, last))
    llm.collective_rpc("leave", args=(str(path),)) if RANKS == 1 and not GPU else None


def skyrl(llm: LLM, tensors: Tensors) -> None:
    llm.collective_rpc("skyrl_start_weight_update", kwargs={"is_checkpoint_format": True})
    try:
        for number, bucket in enumerate(buckets(tensors, 3)):
            packed = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
            info = {
                "names": [name for name, _ in bucket],
                "dtype_names": ["bfloat16"] * len(bucket),
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "sizes": [tensor.numel() for _, tensor in bucket],
            }
            chunk = FOLDER / f"chunk-{number}"
            kept = {uuid(rank): shared(chunk, packed, rank) for rank in range(RANKS if GPU else 1)}
            handles = pickle.dumps({name: handle for name, (_, handle) in kept.items()})
            info["ipc_handles_pickled"] = base64.b64encode(handles).decode()
            llm.collective_rpc("update_weights_ipc", kwargs={"update_info": info})
    except Exception:
        with contextlib.suppress(Exception):  # the workers wait for it, and it says once more why
            llm.collective_rpc("skyrl_finish_weight_update")
        raise
    llm.collective_rpc("skyrl_finish_weight_update")


def checkpoint_engine(llm: LLM, tensors: Tensors) -> None:
    def laid_out(bucket: Tensors) -> Iterator[tuple[dict[str, Any], Tensor]]:
        start = 0
        for name, tensor in bucket:
            yield {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": start}, tensor
            start += -(-tensor.nbytes // 256) * 256

    parts = [list(laid_out(bucket)) for bucket in buckets(tensors, 3)]
    size = max(spec["offset"] + tensor.nbytes for part in parts for spec, tensor in part)

    def sender(rank: int) -> Callable[[], None]:
        socket = zmq.Context.instance().socket(zmq.REQ)
        socket.bind(f"ipc://{FOLDER}/engine-{rank}")

        def say(message: Any) -> None:
            socket.send_pyobj(message)
            answer = socket.recv()
            assert answer == b"", answer.decode()

        def send() -> None:
            buffer, handle = shared(FOLDER / f"buffer-{rank}", torch.zeros(size, dtype=torch.uint8), rank)
            say(handle)
            for part in parts:
                for spec, tensor in part:
                    place = buffer[spec["offset"] : spec["offset"] + tensor.nbytes]
                    place.copy_(tensor.reshape(-1).view(torch.uint8))
                torch.cuda.synchronize(rank) if GPU else None
                say([spec for spec, _ in part])
            say(None)
            say(None)
            socket.close()

        return send

    name = current_platform.get_device_uuid if GPU else lambda rank: f"{DEVICE}-{rank}"
    where = {name(rank): f"ipc://{FOLDER}/engine-{rank}" for rank in range(RANKS)}
    senders = [sender(rank) for rank in range(RANKS)]
    beside(lambda: llm.collective_rpc("update_weights_from_ipc", args=(where,)), *senders)


WORKERS: dict[str, tuple[Update, str, dict[str, Any]]] = {
    "verl": (
        verl,
        "verl_worker.vLLMColocateWorkerExtension",
        {"load_format": "dummy", "enable_sleep_mode": GPU},
    ),
    "openrlhf": (
        openrlhf,
        "openrlhf_worker.SharedWorkerWrap",
        {"additional_config": {"fp8ext": {"load_weights_end": "complete"}}},
    ),
    "skyrl": (
        skyrl,
        "skyrl_worker.NewInferenceWorkerWrap",
        {"weight_transfer_config": {"backend": "ipc"}},
    ),
    "checkpoint_engine": (checkpoint_engine, "checkpoint_engine_worker.SharedWorkerExtension", {}),
}


def main(out: Path, name: str) -> None:
    update, extension, options = WORKERS[name]
    if RANKS > 1:
        options |= {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(RANKS)))
    llm = LLM(**OPTIONS, **options, worker_extension_cls=extension)
    facts: dict[str, Any] = {"updates": []}
    with embedded_blocking(llm) as weights:
        manifest = Manifest.from_dict(weights.manifest())
        facts["start"] = [weights.weights().state, sample(llm)]
        if name == "verl":  # colocated with its trainer
            llm.sleep(2)
            llm.wake_up(["weights"])
            update(llm, list(stored(EARLY)))
            llm.wake_up(["kv_cache"])
            facts["awake"] = [weights.weights().state, len(sample(llm))]
            facts["first"] = weights.digests().digests == checkpoint_digests(EARLY, manifest)
        for folder in (LATE, EARLY, LATE):
            update(llm, list(stored(folder)))
            served = weights.digests()
            facts["updates"].append([served.epoch, served.digests == checkpoint_digests(folder, manifest)])
        facts["verified"] = weights.verify().epoch
        facts["sampled"] = sample(llm)
        broken = [(each, tensor * torch.inf if "norm" in each else tensor) for each, tensor in stored(EARLY)]
        try:
            update(llm, broken)
        except Exception as error:
            facts["refused"] = str(error).splitlines()[-1]
        facts["untouched"] = weights.digests() == served
        if (
            name == "openrlhf"
        ):  # each call is one of its own: what comes after the refused one began an update
            weights.abandon(weights.weights().update) if weights.weights().update else None
        update(llm, list(stored(EARLY)))
        facts["afterwards"] = weights.digests().digests == checkpoint_digests(EARLY, manifest)
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

# SPDX-License-Identifier: Apache-2.0
"""Trainers' own worker extensions bring weights to an `LLM`, driven as their trainers drive them.

Takes a file for what it saw, as JSON, the trainer's name, and the number of ranks.
"""

import base64
import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # trainers send dtypes and handles in their calls
os.environ.setdefault("VERL_RAY_JOB_ID", str(os.getpid()))  # processes of the engine import this, too
sys.path.insert(0, str(Path(__file__).parent))

import torch
import trainer_senders
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
PATIENCE_SECONDS = 30.0
"""How long a call waits for a trainer that may have died."""


def beside(call: Callable[[], Any], *senders: Callable[[], Any]) -> None:
    """Call the engine while trainers send."""
    with ThreadPoolExecutor(len(senders)) as pool:
        sending = [pool.submit(sender) for sender in senders]
        call()
        for each in sending:
            each.result(30)


def verl(llm: LLM, tensors: Tensors) -> None:
    beside(lambda: verl_call(llm), *(partial(trainer_senders.verl, tensors, rank) for rank in range(RANKS)))


def verl_call(llm: LLM) -> None:
    call = {"peft_config": None, "base_sync_done": False, "use_shm": not GPU}
    llm.collective_rpc("update_weights_from_ipc", kwargs=call)


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


def skyrl(llm: LLM, tensors: Tensors, *, dies: bool = False) -> None:
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
            if dies:
                return
    except Exception:
        with contextlib.suppress(Exception):  # the workers wait for it, and it says once more why
            llm.collective_rpc("skyrl_finish_weight_update")
        raise
    llm.collective_rpc("skyrl_finish_weight_update")


def checkpoint_engine(llm: LLM, tensors: Tensors) -> None:
    parts, size = trainer_senders.parts_of(tensors)
    senders = [partial(trainer_senders.checkpoint_engine, parts, size, rank, FOLDER) for rank in range(RANKS)]
    beside(lambda: checkpoint_engine_call(llm), *senders)


def checkpoint_engine_call(llm: LLM) -> None:
    name = current_platform.get_device_uuid if GPU else lambda rank: f"{DEVICE}-{rank}"
    where = {name(rank): f"ipc://{FOLDER}/engine-{rank}" for rank in range(RANKS)}
    llm.collective_rpc("update_weights_from_ipc", args=(where,))


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


def dies_between_calls(llm: LLM, name: str, tensors: Tensors) -> None:
    """Bring a part of an update by calls that return; then the trainer is no more.

    SkyRL's worker begins no update before somebody ends the one that it knows of.
    """
    if name == "skyrl":
        skyrl(llm, tensors, dies=True)
        with contextlib.suppress(Exception):  # tensors are missing
            llm.collective_rpc("skyrl_finish_weight_update")
    else:
        openrlhf(llm, tensors[: len(tensors) // 2])


def dies_in_a_call(llm: LLM, name: str) -> str | None:
    """Have a trainer's process killed, in which a call on all workers waits for it. Returns how the call failed."""
    line = [
        sys.executable,
        "-P",
        str(Path(__file__).parent / "trainer_senders.py"),
        name,
        str(RANKS),
        str(FOLDER),
    ]
    trainer = subprocess.Popen(line)
    try:
        {"verl": verl_call, "checkpoint_engine": checkpoint_engine_call}[name](llm)
    except Exception as error:
        return f"{trainer.wait(60)} {type(error).__name__}"
    return None


def main(out: Path, name: str) -> None:
    update, extension, options = WORKERS[name]
    if RANKS > 1:
        options |= {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(RANKS)))
    if RANKS > 1 and name in ("verl", "checkpoint_engine"):
        options["additional_config"] = {"fp8ext": {"native_update_seconds": PATIENCE_SECONDS}}
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
        if name in ("openrlhf", "skyrl"):
            dies_between_calls(llm, name, list(stored(LATE)))
            facts["stayed"] = weights.digests().digests == checkpoint_digests(EARLY, manifest)
            update(llm, list(stored(LATE)))
            facts["began anew"] = weights.digests().digests == checkpoint_digests(LATE, manifest)
        elif RANKS > 1:
            facts["killed"] = dies_in_a_call(llm, name)
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

# SPDX-License-Identifier: Apache-2.0
"""Weights come by `model.load_weights` in the workers of an `LLM`. Writes what it saw, as JSON, to a file."""

import json
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

from llm_scenario import OPTIONS, sample
from vllm import LLM

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests

Facts = dict[str, Any]
NAMES = sorted(dict(stored(LATE)))
RANKS = int(sys.argv[2])
FINALIZE, PROCESS = "finalize_layerwise_reload", "process_weights_after_loading"


def refusal(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        return str(error).splitlines()[-1]
    return None


class Trainer:
    """Calls the workers of an engine as a trainer does."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def load(self, folder: Path, names: Sequence[str] = NAMES, **more: Any) -> list[int]:
        return self.llm.collective_rpc("load", args=(str(folder), list(names)), kwargs=more)

    def mark(self, call: str) -> None:
        self.llm.collective_rpc("mark", args=(call,))


def sessions(llm: LLM, weights: Any) -> Facts:
    trainer, facts = Trainer(llm), Facts()
    manifest = Manifest.from_dict(weights.manifest())
    early, late = (checkpoint_digests(folder, manifest) for folder in (EARLY, LATE))

    def served() -> str:
        found = weights.digests().digests
        return "early" if found == early else "late" if found == late else "other"

    facts["cold"] = [served(), sample(llm)]
    shuffled = random.Random(0).sample(NAMES, len(NAMES))
    for number, name in enumerate(shuffled):
        trainer.load(LATE, [name], change=("", "fp32", "lent", "wrapped")[number % 4])
    status = weights.weights()
    facts["before the mark"] = [served(), sample(llm) == facts["cold"][1], status.state, status.epoch]
    trainer.mark(PROCESS)
    facts["late"] = [served(), sample(llm), weights.verify().epoch]
    facts["in one call"] = [trainer.load(EARLY, end="finish_weight_update"), served()]

    qkv = [name for name in NAMES if "layers.0.self_attn" in name and "o_proj" not in name]
    trainer.load(LATE, qkv, change="lent", end=FINALIZE)
    found = weights.digests().digests
    facts["a part"] = [
        found == {**early, **{name: late[name] for name in late if name in qkv}},
        weights.verify().epoch,
    ]
    return facts | refusals(trainer, weights, served, qkv)


def refusals(trainer: Trainer, weights: Any, served: Callable[[], str], qkv: list[str]) -> Facts:
    facts = Facts()
    trainer.load(EARLY, end=FINALIZE)
    k = next(name for name in qkv if "k_proj" in name)
    facts["refused"] = {
        "infinite": refusal(lambda: trainer.load(LATE, [k], change="infinite")),
        "shape": refusal(lambda: trainer.load(LATE, [k], change="shape")),
        "unknown": refusal(lambda: trainer.load(LATE, [k], change="unknown")),
        "twice": refusal(lambda: trainer.load(LATE, [k, k])),
        "incomplete": refusal(lambda: trainer.load(LATE, [k], end=FINALIZE)),
        "nothing": refusal(lambda: trainer.mark(FINALIZE)),
        "raises": refusal(lambda: trainer.load(LATE, [k], change="raises")),
        "after its end": refusal(lambda: trainer.mark(FINALIZE)),
    }
    if RANKS > 1:
        uneven = refusal(lambda: trainer.llm.collective_rpc("uneven", args=(str(LATE), qkv)))
        facts["refused"]["one rank"] = uneven
    opened = weights.open()
    facts["refused"]["another is open"] = refusal(lambda: trainer.load(LATE))
    weights.abandon(opened.id)
    trainer.load(LATE, NAMES[:5])
    try:
        weights.open()
    except UpdateError as error:
        facts["refused"]["open beside"] = error.kind
    facts["untouched"] = [served(), weights.verify().epoch]

    half = NAMES[: len(NAMES) // 2]
    trainer.load(LATE, half)  # as of a trainer that died; the next one begins anew
    trainer.load(LATE, NAMES)
    trainer.mark(PROCESS)
    facts["sent again"] = served()
    trainer.load(LATE, half)
    trainer.load(LATE, half)
    facts["half again"] = refusal(lambda: trainer.mark(PROCESS))
    trainer.load(LATE, half)
    trainer.mark("initialize_layerwise_reload")
    trainer.load(EARLY, NAMES, end=FINALIZE)
    facts["begun anew"] = served()

    trainer.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(LATE)})
    facts["reloaded"] = [served(), weights.verify().epoch]
    beside: list[int] = []
    generating = threading.Thread(target=lambda: beside.extend(sample(trainer.llm, 600)))
    generating.start()
    trainer.load(EARLY, end=FINALIZE)
    facts["beside requests"] = [generating.is_alive(), served()]
    generating.join()
    facts["went on"] = len(beside)

    trainer.llm.sleep(2)
    facts["asleep"] = refusal(lambda: trainer.load(LATE))
    trainer.llm.wake_up(["weights"])
    facts["part of discarded weights"] = refusal(lambda: trainer.load(LATE, qkv, end=FINALIZE))
    trainer.load(LATE, end=PROCESS)
    trainer.llm.wake_up(["kv_cache"])
    facts["awake"] = [served(), sample(trainer.llm)]

    trainer.llm.collective_rpc("write", args=("model.norm.weight",))
    try:
        weights.verify()
    except UpdateError as error:
        facts["written past all loaders"] = [error.kind, weights.weights().state]
    trainer.load(LATE, end=PROCESS)
    facts["healed"] = [served(), weights.weights().state]
    return facts


def main(out: Path, ranks: int) -> None:
    parallel: Facts = (
        {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"} if ranks > 1 else {}
    )
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    llm = LLM(**OPTIONS, **parallel, worker_extension_cls="loading_worker.LoadingWorker")
    with embedded_blocking(llm) as weights:
        facts = sessions(llm, weights)
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

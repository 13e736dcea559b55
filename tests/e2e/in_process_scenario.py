# SPDX-License-Identifier: Apache-2.0
"""An engine in the trainer's process, on a folder without weights.

The trainer calls `load_weights` of its model, one tensor a call, and never says that it is done. Writes what it saw, as JSON,
to a file.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from llm_scenario import OPTIONS, sample
from vllm import LLM

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.errors import ForeignLoadError, UpdateError
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests


def told(core: Any, operation: str) -> dict[str, Any]:
    """What the update engine answers."""
    reply = core.fp8ext(operation, {})
    job = reply["value"].get("job", 0)
    while reply["kind"] in ("JobStarted", "Progress"):
        time.sleep(0.001)
        reply = core.fp8ext("poll", {"job": job})
    value: dict[str, Any] = reply["value"]
    return value


def main(out: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    folder = out.parent / "model"
    folder.mkdir()
    for file in EARLY.glob("*.json"):
        shutil.copy(file, folder)
    settings = {"fp8ext": {"load_weights_end": "complete"}}
    options = {**OPTIONS, "model": str(folder), "distributed_executor_backend": "uni"}
    llm = LLM(**options, load_format="dummy", additional_config=settings)
    client = llm.llm_engine.engine_core
    core, model = client.engine_core, llm.llm_engine.model_executor.driver_worker.model_runner.model
    facts: dict[str, Any] = {"start": [told(core, "status")["state"], sample(llm)]}
    facts["names"] = (
        Manifest.from_dict(told(core, "manifest")["manifest"]).tensors.keys() == dict(stored(EARLY)).keys()
    )
    for name, checkpoint in (("early", EARLY), ("late", LATE)):
        tensors = list(stored(checkpoint))
        for tensor in tensors[:-1]:
            model.load_weights([tensor])
        before = told(core, "status")["epoch"]
        model.load_weights([tensors[-1]])
        digests = told(core, "digests")
        facts[name] = [
            before,
            digests["epoch"],
            digests["digests"] == checkpoint_digests(checkpoint),
            sample(llm),
        ]
    tensor = tensors[0][1]
    try:
        model.load_weights([(tensors[0][0], tensor[:1])])
    except UpdateError as error:
        facts["refused"] = error.kind
    try:
        model.model.load_weights(tensors)
    except ForeignLoadError as error:
        facts["a part"] = error.what
    facts["verified"] = told(core, "verify")["epoch"]
    facts["again"] = sample(llm) == facts["late"][3]
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

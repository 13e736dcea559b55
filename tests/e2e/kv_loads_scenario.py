# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 KV cache come by `load_weights` among the tensors, in NeMo-RL's order of calls. Writes what it saw, as
JSON, to a file.

Its calls: batches, of which the last has scales of one number as vLLM names them in checkpoints, then
`process_weights_after_loading`, and that once more for the KV cache.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

from llm_scenario import OPTIONS, sample
from vllm import LLM

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests


def scales(of: float, names: tuple[str, ...] = ("attn.q_scale", "k_scale", "v_scale")) -> dict[str, float]:
    """Scales of both layers: of Q, K and V ones that differ."""
    return {
        f"model.layers.{layer}.self_attn.{name}": of * (1 + layer + 4 * number)
        for layer in range(LAYERS)
        for number, name in enumerate(names)
    }


def main(out: Path) -> None:
    llm = LLM(
        **OPTIONS,
        kv_cache_dtype="fp8",
        additional_config={"fp8ext": {"kv_scales": "provided"}},
        worker_extension_cls="loading_worker.LoadingWorker",
    )
    facts: dict[str, Any] = {}

    def update(folder: Path, more: dict[str, float]) -> None:
        llm.collective_rpc("load_with_scales", args=(str(folder), more))

    with embedded_blocking(llm) as weights:
        manifest = Manifest.from_dict(weights.manifest())
        sent = scales(0.5)
        update(LATE, sent)
        served = weights.kv_scales()
        facts["served"], facts["sent"] = served.scales, sent
        facts["source"] = served.source
        facts["weights"] = weights.digests().digests == checkpoint_digests(LATE, manifest)
        facts["sampled"] = len(sample(llm))
        refused = {
            "none": {},
            "half": scales(0.5, ("k_scale",)),
            "zero": scales(0.0),
        }
        for name, bad in refused.items():
            try:
                update(EARLY, bad)
            except Exception as error:
                facts[name] = str(error).splitlines()[-1]
        facts["untouched"] = [weights.kv_scales().scales == served.scales, weights.verify().epoch]
        update(EARLY, scales(0.25))
        facts["again"] = weights.kv_scales().scales
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    LAYERS = json.loads((EARLY / "config.json").read_text())["num_hidden_layers"]
    main(Path(sys.argv[1]))

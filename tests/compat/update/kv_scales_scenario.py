# SPDX-License-Identifier: Apache-2.0
"""Real models with an FP8 KV cache, built in a process of its own as a worker builds them; what came of each as JSON.

`kv_scales_scenario.py CASES OUT`: CASES are `{name: [kv_cache_dtype, settings, engine options]}`.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.compat.update.kv_rescale import CachedCodes
from vllm_fp8ext.compat.update.kv_scales import attention_layers, gather, kv_scales_of
from vllm_fp8ext.compat.update.shadow_attention import attend_plainly
from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.update.contract.kv_tokens import Tokens
from vllm_fp8ext.update.worker.kv_scales import RankKv
from vllm_fp8ext.update.worker.score_prompts import observe_kv

CPU = torch.device("cpu")
PROMPTS = [[5 + 7 * i % 110 for i in range(70)], [9], [3 + 11 * i % 120 for i in range(33)]]

Seen = dict[str, list[torch.Tensor]]


def heard(model: Any, prompts: list[list[int]], lengths: bool = True) -> Seen:
    """Queries, keys and values by layer."""
    collected: Seen = {}

    def see(layer: str, *parts: torch.Tensor) -> None:
        collected[layer] = [part.clone() for part in parts]

    def attend(model: Any, after: Any, see: Any, known: Any) -> None:
        attend_plainly(model, after, see, known if lengths else None)

    observe_kv(model, prompts, CPU, attend, see, lambda: None)
    return collected


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def packed(model: Any) -> dict[str, Any]:
    """Prompts in one pass against one pass each; and when each sees those before it."""
    together, mixed = heard(model, PROMPTS), heard(model, PROMPTS, lengths=False)
    alone = [heard(model, [prompt]) for prompt in PROMPTS]
    joined = {
        layer: [torch.cat([part[layer][kind] for part in alone]) for kind in range(3)] for layer in together
    }
    return {
        "shapes": {layer: [list(part.shape) for part in parts] for layer, parts in together.items()},
        "packed": {
            layer: [distance(a, b) for a, b in zip(parts, joined[layer], strict=True)]
            for layer, parts in together.items()
        },
        "mixed": {
            layer: [distance(a, b) for a, b in zip(parts, joined[layer], strict=True)]
            for layer, parts in mixed.items()
        },
    }


def calibrated(model: Any) -> dict[str, Any]:
    """The first scales of a rank, with every copy that vLLM reads, and amax of what was heard."""
    settings = KvScaleSettings(policy="calibrate")
    served = named(model)
    kv = RankKv(kv_scales_of(served, settings, 2, CPU), settings, CachedCodes(served))
    kv.begin(model, CPU, attend_plainly, Tokens(PROMPTS, "update"), gather)
    names = ("_k_scale", "_k_scale_float", "_k_scale_cpu", "_v_scale", "_v_scale_float", "_v_scale_cpu")
    names += ("_q_scale", "_q_scale_float")
    layers = attention_layers(model)
    return {
        "scales": kv.scales.served(),
        "copies": {layer.layer_name: [float(getattr(layer, name)) for name in names] for layer in layers},
        "amax": {
            layer: [float(part.abs().max()) for part in parts]
            for layer, parts in heard(model, PROMPTS).items()
        },
        "told": asdict(kv.calibration) if kv.calibration else {},
        "kept": kv.observer is not None,
    }


def main() -> None:
    """One process group for all of them."""
    _set_torch_accelerator_to_noop()  # as a worker on a CPU does
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    answers: dict[str, Any] = {}
    for name, (dtype, chosen, options) in cases.items():
        config = EngineArgs(
            model=str(EARLY),
            quantization="blockfp8",
            kv_cache_dtype=dtype,
            max_model_len=256,
            enforce_eager=True,
            additional_config={"fp8ext": chosen},
            **options,
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                store = tempfile.mkdtemp()
                init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
                initialize_model_parallel(1)
            try:
                model: Any = get_model(vllm_config=config)
                answers[name] = {"static": kv_of(model)}
                if options:
                    answers[name] |= {"calibrated": calibrated(model)}
                if name == "calibrate":
                    answers[name] |= {"packed": packed(model), "calibrated": calibrated(model)}
                    try:
                        head = KvScaleSettings(policy="calibrate", granularity="head")
                        kv_scales_of(named(model), head, 3, CPU)
                    except Exception as error:
                        answers[name]["heads"] = f"{type(error).__name__}: {error}"
            except Exception as error:
                answers[name] = f"{type(error).__name__}: {error}"
    with open(sys.argv[2], "w") as file:
        json.dump(answers, file)


def named(model: Any) -> dict[str, Any]:
    """Attention layers by name."""
    return {layer.layer_name: layer for layer in attention_layers(model)}


def kv_of(model: Any) -> list[list[float]]:
    """K, V and Q scales as loaded, by layer."""
    return [
        [layer._k_scale_float, layer._v_scale_float, layer._q_scale_float]
        for layer in attention_layers(model)
    ]


if __name__ == "__main__":
    main()

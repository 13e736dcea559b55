# SPDX-License-Identifier: Apache-2.0
"""An engine that compiles its model; writes what is in its graphs and how often activations are quantized apart.

graph_scenario.py FOLDER FACTS
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import fx
from vllm import LLM, SamplingParams

from vllm_fp8ext.compat.graphs.fusion import JoinLinear

WEIGHT = {"linear": 1, "rmsnorm_linear": 4, "gated_linear": 2, "quantized_linear": 2}
"""Which argument it is, by operator."""
BATCHES = {"prefill": (1, 300), "many small": (40, 5), "many that decode": (40, 1), "decode": (1, 1)}
"""Requests and tokens of each prompt."""


def main(folder: str, facts: str) -> None:
    graphs: set[str] = set()
    original = JoinLinear.__call__

    def watched(self: JoinLinear, graph: fx.Graph) -> None:
        original(self, graph)
        for node in graph.nodes:
            if node.op == "call_function" and str(node.target).startswith("fp8ext."):
                name = str(node.target).split(".")[1]
                n, k = node.args[WEIGHT[name]].meta["val"].shape if name in WEIGHT else (0, 0)
                graphs.add(f"{name} {n}x{k}")

    JoinLinear.__call__ = watched  # type: ignore[method-assign]  # looked at on its way
    llm = LLM(
        folder,
        quantization="blockfp8",
        max_model_len=1024,
        kv_cache_memory_bytes=512 << 20,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        max_num_seqs=64,
        async_scheduling=False,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 40]},
    )
    quantized = {name: _quantized(llm, *batch) for name, batch in BATCHES.items()}
    Path(facts).write_text(json.dumps({"graphs": sorted(graphs), "quantized": quantized}))


def _quantized(llm: LLM, requests: int, tokens: int) -> int:
    """Launches of the kernel that quantizes activations and does nothing else, in the step that reads the prompts."""
    prompts: Any = [
        {"prompt_token_ids": [3 + (5 * i + n) % 500 for i in range(tokens)]} for n in range(requests)
    ]
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)  # what is compiled late is compiled now
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        llm.generate(prompts, params, use_tqdm=False)
    return sum(event.count for event in seen.key_averages() if event.key.startswith("_quantize_activation"))


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""An engine that serves with whatever kernels run; writes which ones its linear layers take, and what it answers.

kernels_scenario.py FOLDER FACTS
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_fp8ext.layers.linear import BlockFp8LinearMethod


def main(folder: str, facts: str) -> None:
    llm = LLM(
        folder,
        quantization="blockfp8",
        max_model_len=1024,
        kv_cache_memory_bytes=512 << 20,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        max_num_seqs=64,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 40]},
    )
    prompts: Any = [{"prompt_token_ids": [3 + (5 * i + n) % 500 for i in range(300)]} for n in range(40)]
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, temperature=0.0, logprobs=1)
    answers = [llm.generate(part, params, use_tqdm=False) for part in (prompts[:1], prompts)]
    logprobs = [
        next(iter(step.values())).logprob
        for batch in answers
        for answer in batch
        for step in answer.outputs[0].logprobs or ()
    ]
    (routes,) = llm.apply_model(_routes)
    Path(facts).write_text(json.dumps({"gemms": routes, "logprobs": logprobs}))


def _routes(model: Any) -> list[str]:
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    matching = {
        str(method.route and method.route.gemm)
        for method in methods
        if isinstance(method, BlockFp8LinearMethod)
    }
    return sorted(matching)


if __name__ == "__main__":
    main(*sys.argv[1:])

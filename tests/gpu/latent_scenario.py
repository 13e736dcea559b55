# SPDX-License-Identifier: Apache-2.0
"""Engines that replay CUDA graphs over weights that vLLM derives or multiplies by its own kernels: latent attention, and
experts in 16 bits.

latent_scenario.py FOLDER FACTS OPTIONS: the folder has `early` and `late`; the options are an engine's, as JSON.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests

PROMPTS = [[3 + (5 * place + 7 * row) % 100 for place in range(60)] for row in range(3)]


def engine_on(folder: Path, options: dict[str, Any]) -> LLM:
    return LLM(
        str(folder),
        quantization="blockfp8",
        max_model_len=512,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        max_num_seqs=8,
        enable_prefix_caching=False,
        **options,
    )


def sample(llm: LLM) -> list[Any]:
    """Token ids and log-probabilities, greedily, one request at a time."""
    wanted = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    found = []
    for prompt in PROMPTS:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)
        ids = list(output.outputs[0].token_ids)
        steps = zip(ids, output.outputs[0].logprobs or [], strict=True)
        found.append([ids, [step[token].logprob for token, step in steps]])
    return found


def end(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    torch.cuda.empty_cache()


def main(folder: Path, out: Path, options: dict[str, Any]) -> None:
    layout = options.pop("expert_layout", None)
    cold = engine_on(folder / "late", options)
    facts: dict[str, Any] = {"cold": sample(cold)}
    end(cold)
    llm = engine_on(folder / "early", options)
    with embedded_blocking(llm) as weights:
        facts["early"] = sample(llm)
        weights.push(dict(stored(folder / "late")), version="late", expert_layout=layout)
        manifest = Manifest.from_dict(weights.manifest())
        expected = checkpoint_digests(folder / "late", manifest, expert_layout=layout)
        facts["digests"] = weights.digests().digests == expected
        facts["late"] = sample(llm)
        weights.rollback()
        facts["rolled back"] = sample(llm)
    end(llm)
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))

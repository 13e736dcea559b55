# SPDX-License-Identifier: Apache-2.0
"""A tiny Gemma 2, whose layers share a constant without dimensions. Writes what an update of it did, as JSON, to a file."""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM
from vllm import LLM, SamplingParams

from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.transports.wire import stored

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "sliding_window": 64,
}


def written(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    Gemma2ForCausalLM(Gemma2Config(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def sample(llm: LLM) -> list[int]:
    wanted = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], wanted, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def main(out: Path) -> None:
    one, other = (written(out.parent / name, seed) for seed, name in enumerate(("one", "other")))
    llm = LLM(
        str(one),
        quantization="blockfp8",
        max_model_len=256,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
    )
    facts = {"one": sample(llm)}
    with embedded_blocking(llm) as weights:
        weights.push(dict(stored(other)), version="other")
        facts["other"] = sample(llm)
        weights.rollback()
        facts["one again"] = sample(llm)
        facts["state"] = weights.weights().state
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

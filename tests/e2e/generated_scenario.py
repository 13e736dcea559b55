# SPDX-License-Identifier: Apache-2.0
"""An engine on a small generated checkpoint. Takes a file, to which it writes what it saw, as JSON, and the shape's name."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from small_shapes import small
from vllm import LLM, SamplingParams

from vllm_fp8ext.bench import generated
from vllm_fp8ext.bench.tokenizer import write_tokenizer


def main(out: Path, name: str) -> None:
    generated.SHAPES[name] = small(name)
    folder = out.with_name("checkpoint")
    generated.write_checkpoint(folder, name, 0, "cpu")
    write_tokenizer(folder)
    sizes = generated.SHAPES[name]
    options: dict[str, Any] = {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in sizes else {}
    if "vision_config" in sizes:
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    llm = LLM(
        str(folder),
        quantization="blockfp8",
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.1,
        **options,
    )
    wanted = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": list(range(5, 40))}], wanted, use_tqdm=False)
    answer = output.outputs[0]
    tokens = list(answer.token_ids)
    steps = zip(tokens, answer.logprobs or [], strict=True)
    out.write_text(json.dumps([tokens, [step[token].logprob for token, step in steps], answer.text]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

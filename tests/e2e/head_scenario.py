# SPDX-License-Identifier: Apache-2.0
"""One engine with a setting of `lm_head`: whether its logits are those of the setting, and what updates do to them.

Takes a file, to which it writes what it saw, as JSON; `tied`, `untied`, or `serialized` (untied, with projections that are
block FP8 already); the setting; and the number of ranks. Vocabularies are padded: this one's size is no multiple of 64.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function goes to the workers
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from block_fp8 import write_block_fp8
from families import ENDS, TEXT
from safetensors.torch import load_file
from torch import Tensor
from vllm import LLM, SamplingParams

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

VOCABULARY, PADDED = 370, 384
PROMPT = list(range(3, 67))


def write(folder: Path, seed: int, *, tied: bool, serialized: bool) -> None:
    torch.manual_seed(seed)
    shape = {**TEXT, "vocab_size": VOCABULARY}
    config = transformers.Qwen3Config(**shape, **ENDS, tie_word_embeddings=tied)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.05)
    model.save_pretrained(folder)
    if serialized:
        write_block_fp8(folder, folder)


def expected(folder: Path, tied: bool, ranks: int, x_MK: Tensor) -> dict[str, Tensor]:
    """Logits `[M, vocabulary]` of the output layer alone, by the setting. Each rank has blocks of its own."""
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    quantized = reference.quantize_activation(x_MK)
    parts = (reference.quantize_weight(part) for part in weight.split(PADDED // ranks))
    return {
        "bf16": x_MK @ weight.T,
        "fp32": x_MK.float() @ weight.float().T,
        "blockfp8": torch.cat([reference.gemm(*quantized, *part) for part in parts], dim=1),
    }


def states() -> Tensor:
    """Hidden states `[M, K]`."""
    return torch.randn(17, TEXT["hidden_size"], generator=torch.Generator().manual_seed(5)).bfloat16()


def logits_of(worker: Any) -> tuple[str, list[list[float]]] | None:
    """Logits of one rank, and their dtype; None on ranks that get none."""
    model = worker.model_runner.get_model()
    with torch.inference_mode():
        logits = model.compute_logits(states().to(next(model.parameters()).device))
    return None if logits is None else (str(logits.dtype), logits.tolist())


def compared(llm: LLM, folder: Path, tied: bool, ranks: int) -> dict[str, Any]:
    """The dtype of logits, and their distance from each expectation, as a share of the largest."""
    dtype, logits = llm.collective_rpc(logits_of)[0]
    distances = {
        head: float((torch.tensor(logits) - values.float()).abs().max() / values.abs().max())
        for head, values in expected(folder, tied, ranks, states()).items()
    }
    return {"dtype": dtype, "distances": distances}


def engine(folder: Path, head: str, ranks: int) -> LLM:
    more: dict[str, Any] = {"enforce_eager": True}
    if torch.cuda.device_count():  # so that graphs sample
        more = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}
    if ranks > 1:
        more |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    return LLM(
        str(folder),
        quantization="blockfp8",
        max_model_len=128,
        max_logprobs=VOCABULARY,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=32 << 20,
        skip_tokenizer_init=True,
        additional_config={"fp8ext": {"lm_head": head}},
        **more,
    )


def served(llm: LLM) -> Tensor:
    """Log-probabilities `[tokens, vocabulary]` of the prompt."""
    asked = SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=VOCABULARY)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
    rows = output.prompt_logprobs[1:]
    return torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in rows])


def sampled(llm: LLM) -> list[Any]:
    """Tokens and their log-probabilities, by the way of flat logprobs.

    Requests run beside each other on a GPU. On a CPU they come one by one: floats depend on who else is in a step.
    """
    asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1)
    prompts: list[Any] = [{"prompt_token_ids": PROMPT[:9]}] * 3
    beside = [prompts] if torch.cuda.device_count() else [[prompt] for prompt in prompts]
    outputs = [output for each in beside for output in llm.generate(each, asked, use_tqdm=False)]
    return [
        [(token, step[token].logprob) for token, step in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


def apart(llm: LLM, prompt: Tensor, answers: list[Any]) -> list[float]:
    """How far log-probabilities are from these, of the prompt and of what is sampled; infinity, where other tokens are."""
    now = sampled(llm)
    pairs = [pair for one, other in zip(answers, now, strict=True) for pair in zip(one, other, strict=True)]
    same = all(first[0] == second[0] for first, second in pairs)
    furthest = max(abs(first[1] - second[1]) for first, second in pairs)
    return [float((served(llm) - prompt).abs().max()), furthest if same else math.inf]


def main() -> None:
    out, tied, head, ranks = Path(sys.argv[1]), sys.argv[2] == "tied", sys.argv[3], int(sys.argv[4])
    if ranks > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    folders = [out.parent / name for name in ("early", "late")]
    for seed, folder in enumerate(folders):
        write(folder, seed, tied=tied, serialized=sys.argv[2] == "serialized")
    early, late = folders
    llm = engine(early, head, ranks)
    with embedded_blocking(llm) as weights:
        manifest = Manifest.from_dict(weights.manifest())
        target = "model.embed_tokens.weight" if tied else "lm_head.weight"
        facts: dict[str, Any] = {"quantized": [piece.quantized for piece in manifest.pieces[target]]}
        facts["cold"] = weights.digests().digests == checkpoint_digests(early, manifest)
        first, first_sampled = served(llm), sampled(llm)
        facts["logits"] = [compared(llm, early, tied, ranks)]
        weights.push(late, version="late")
        facts["pushed"] = weights.digests().digests == checkpoint_digests(late, manifest)
        facts["logits"].append(compared(llm, late, tied, ranks))
        second, second_sampled = served(llm), sampled(llm)
        weights.rollback()
        facts["logits"].append(compared(llm, early, tied, ranks))
        facts["rolled back"] = apart(llm, first, first_sampled)
        facts["verified"] = weights.verify().epoch == weights.weights().epoch
    llm.llm_engine.engine_core.shutdown()
    llm = engine(late, head, ranks)
    facts["as after a cold start"] = apart(llm, second, second_sampled)
    facts["others than before"] = not torch.equal(first, second)
    llm.llm_engine.engine_core.shutdown()
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Servers that do not start, and say why: what only the engine or the routes find out.
`tests/compat/test_unsupported_options.py` has what the configuration tells."""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forked_python.processes import run
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import SMALL
from vllm_fp8ext.update.contract.checkpoint_files import INDEX

Outcomes = tuple[dict[str, Any], dict[str, str]]

SERVERS = {
    "routes": (
        ["--additional-config", '{"fp8ext": {"spool_bytes": 262144}}'],
        "Give the container more shared memory",
    ),
    "engine": (["--kv-cache-dtype", "fp8"], "needs a choice of K and V scales"),
}
"""Started as `vllm serve` does; by what refuses: options, and what is said."""

ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "pow2 on fp32 scales": (
        {"additional_config": {"fp8ext": {"scale_format": "pow2"}}},
        "would round its weights",
    ),
    "ignored experts": (
        {"load_format": "dummy", "additional_config": {"fp8ext": {"ignore": ["*.experts"]}}},
        "a block-FP8 checkpoint has no experts in 16 bits: expected ignore without model.layers.0.mlp.experts",
    ),
    "one ignored expert": (
        {
            "load_format": "dummy",
            "additional_config": {"fp8ext": {"ignore": ["model.layers.0.mlp.experts.1.*"]}},
        },
        "blockfp8 serves all experts of a layer alike: expected ignore without model.layers.0.mlp.experts.1.gate_proj",
    ),
    "mixture of experts": (
        {"load_format": "dummy"},
        "each rank must have whole blocks of an expert, found 192 of its columns",
    ),
    "transposed projections": (
        {},
        "transformer.h.0.attn.c_attn.weight: a view of shape [256, 768] is permuted",
    ),
    "projections whose rows are permuted": (
        {},
        "Llama 4: vLLM's loader sorts the rows of q_proj and k_proj anew, where an update could not follow",
    ),
    "stale copy": (
        {},
        "stale: expected each tensor once, found 2 in more than one file. Remove the copies that the index does not name:\n"
        "  model.layers.0.mlp.up_proj.weight (model-1.safetensors, model-2.safetensors)\n"
        "  model.norm.weight (model-1.safetensors, model-2.safetensors)",
    ),
    "stale copy, no updates": (
        {"additional_config": {"fp8ext": {"staging": "none"}}},
        "model.norm.weight (model-1.safetensors, model-2.safetensors)",
    ),
}
"""Engines alone, each in a process of its own that is forked from one where vLLM was imported."""
NAMED = ("transposed projections", "projections whose rows are permuted")
"""Those whose refusal names settings with which the model is served."""

SCRIPT = """
import json, multiprocessing, os, re, sys
from vllm import LLM, SamplingParams

def answer(options):
    try:
        llm = LLM(quantization="blockfp8", distributed_executor_backend="uni", skip_tokenizer_init=True, max_model_len=256,
            enforce_eager=True, gpu_memory_utilization=0.3, kv_cache_memory_bytes=64 << 20, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wanted = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    [output] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], wanted, use_tqdm=False)
    return f"it served {len(output.outputs[0].token_ids)} tokens"

cases = json.load(sys.stdin)
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    found = dict(zip(cases, pool.map(answer, cases.values(), chunksize=1)))
    named = {}
    for case in sys.argv[2:]:
        told = re.search("--additional-config '(.*?)'", found[case])
        named[case] = cases[case] | {"additional_config": json.loads(told[1])} if told else {}
    served = dict(zip(named, pool.map(answer, named.values(), chunksize=1)))
json.dump([found, served], open(sys.argv[1], "w"))
"""


def written(model: PreTrainedModel, folder: Path) -> Path:
    """Write a small model with random weights."""
    model.bfloat16().save_pretrained(folder)
    return folder


SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By case, a small model of a family that is not served by default."""
    folder = tmp_path_factory.mktemp("families")
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    llama = Llama4TextConfig(**SHAPE, **experts, head_dim=64, intermediate_size_mlp=256)
    gpt2 = GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=128, n_positions=512)
    return {
        "transposed projections": written(GPT2LMHeadModel(gpt2), folder / "gpt2"),
        "projections whose rows are permuted": written(Llama4ForCausalLM(llama), folder / "llama4"),
    }


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a small mixture of experts, in DeepSeek's format."""
    folder = tmp_path_factory.mktemp("mixture")
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    experts = {"moe_intermediate_size": 192, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**shape, **heads, **experts, architectures=["Qwen3MoeForCausalLM"])
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The late checkpoint, and in a second file, which the index names for another tensor, copies of the early one's."""
    folder = tmp_path_factory.mktemp("folders") / "stale"
    shutil.copytree(LATE, folder)
    tensors, early = load_file(LATE / "model.safetensors"), load_file(EARLY / "model.safetensors")
    moved, *copied = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    second = {moved: tensors.pop(moved), **{name: early[name] for name in copied}}
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-1.safetensors")
    save_file(second, folder / "model-2.safetensors")
    names = dict.fromkeys(tensors, "model-1.safetensors") | {moved: "model-2.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.fixture(scope="module")
def outcomes(
    block_fp8: Path,
    mixture: Path,
    stale: Path,
    families: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcomes:
    """By case: exit code and output of a server, or the error of an engine; and what came of the settings that errors name.
    All at the same time."""
    models = families | {
        "pow2 on fp32 scales": block_fp8,
        "mixture of experts": mixture,
        "ignored experts": mixture,
        "one ignored expert": mixture,
        "stale copy": stale,
        "stale copy, no updates": stale,
    }
    out = tmp_path_factory.mktemp("engines") / "answers.json"

    def serve(case: str) -> tuple[int, str]:
        line = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(EARLY)]
        line += [
            "--quantization",
            "blockfp8",
            *SMALL,
            *SERVERS[case][0],
            "--port",
            "0",
            "--skip-tokenizer-init",
        ]
        env = {**os.environ, "VLLM_PLUGINS": "fp8ext", "FP8EXT_ADMIN_KEY": "k"}
        done = run(line, env=env, capture_output=True, text=True, timeout=500)
        return done.returncode, done.stdout + done.stderr

    def engines() -> list[dict[str, str]]:
        cases = {case: {"model": str(models[case]), **options} for case, (options, _) in ENGINES.items()}
        env = {**os.environ, "VLLM_PLUGINS": "fp8ext"}
        line = [sys.executable, "-P", "-c", SCRIPT, str(out), *NAMED]
        done = run(line, env=env, input=json.dumps(cases), capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-4000:]
        found: list[dict[str, str]] = json.loads(out.read_text())
        return found

    with ThreadPoolExecutor() as pool:
        alone = pool.submit(engines)
        servers = dict(zip(SERVERS, pool.map(serve, SERVERS), strict=True))
        refused, served = alone.result()
        return {**servers, **refused}, served


@pytest.mark.parametrize("case", SERVERS)
def test_a_server_ends_and_says_why(outcomes: Outcomes, case: str) -> None:
    code, output = outcomes[0][case]
    assert code != 0, output[-4000:]
    assert SERVERS[case][1] in output


@pytest.mark.parametrize("case", ENGINES)
def test_an_engine_is_not_made(outcomes: Outcomes, case: str) -> None:
    assert outcomes[0][case].startswith("ConfigError")
    assert ENGINES[case][1] in outcomes[0][case]


@pytest.mark.parametrize("case", NAMED)
def test_the_settings_that_a_refusal_names_serve_the_model(outcomes: Outcomes, case: str) -> None:
    assert outcomes[1][case] == "it served 4 tokens"

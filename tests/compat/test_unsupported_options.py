# SPDX-License-Identifier: Apache-2.0
"""Every combination that a server refuses at start: real configurations, made as `vllm serve` makes them."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python.processes import run
from transformers import DeepseekV2Config, Llama4TextConfig, Qwen3MoeConfig

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.environment import ADMIN_KEY

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline stages with data parallel ranks": (
        {"pipeline_parallel_size": 2, "data_parallel_size": 2},
        "--data-parallel-size 2 with --pipeline-parallel-size 2: stages of several engine cores were not tried",
    ),
    "pipeline stages with LoRA": (
        {"pipeline_parallel_size": 2, "enable_lora": True},
        "--enable-lora with --pipeline-parallel-size 2: adapters of several stages were not tried",
    ),
    "pipeline stages in place": (
        {"pipeline_parallel_size": 2, "additional_config": {"fp8ext": {"staging": "inplace"}}},
        "staging inplace with --pipeline-parallel-size 2: it was not tried, expected staging shadow",
    ),
    "ranks on several machines": (
        {"tensor_parallel_size": 2, "nnodes": 2},
        "--nnodes 2: bodies of updates lie in the memory of one machine, where ranks of another don't find them",
    ),
    "LoRA of experts": (
        {"model": "experts", "enable_lora": True},
        "--enable-lora with a mixture of experts: updates of layers that adapters are added to were tried in dense",
    ),
    "data parallel ranks of several servers": (
        {"data_parallel_size": 2, "external_lb": True},
        "--data-parallel-external-lb, or --data-parallel-rank: an update spans the engine cores that one server starts",
    ),
    "data parallel ranks on several machines": (
        {"data_parallel_size": 2, "data_parallel_size_local": 1},
        "--data-parallel-size-local: an update spans the engine cores that one server starts on one machine",
    ),
    "data parallel in place": (
        {"data_parallel_size": 2, "additional_config": {"fp8ext": {"staging": "inplace"}}},
        "staging inplace with --data-parallel-size 2: expected staging shadow",
    ),
    "data parallel with LoRA": (
        {"data_parallel_size": 2, "enable_lora": True},
        "--enable-lora with --data-parallel-size 2: adapters of several engine cores were not tried",
    ),
    "data parallel with drafts": (
        {
            "data_parallel_size": 2,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
        },
        "--speculative-config with --data-parallel-size 2: drafts in several engine cores were not tried",
    ),
    "data parallel with sleep": (
        {"data_parallel_size": 2, "sleep": True},
        "--enable-sleep-mode with --data-parallel-size 2: engine cores would fall asleep one by one",
    ),
    "a draft model": (
        {"speculative_config": {"model": str(LATE), "num_speculative_tokens": 2}},
        "--speculative-config with method draft_model: no update brings the weights of a draft model; expected draft_weights",
    ),
    "EPLB": ({"enable_eplb": True}, "--enable-eplb: experts would move between ranks"),
    "EPLB without updates": (
        {"enable_eplb": True, "additional_config": {"fp8ext": {"staging": "none"}}},
        "--enable-eplb: experts would move between ranks",
    ),
    "weights of other ranks' experts": (
        {"enable_ep_weight_filter": True},
        "--enable-ep-weight-filter: no rank would know the names of the others' experts",
    ),
    "CPU offload": ({"cpu_offload_gb": 1}, "CPU offload: offloaded weights have no address"),
    "KV transfer": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "--kv-transfer-config: connectors look K and V up by their tokens; ExampleConnector gave back those of the",
    ),
    "encoder transfer": (
        {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}},
        "--ec-transfer-config: outputs of other weights' encoders",
    ),
    "pooling with prompts": (
        {"runner": "pooling", "additional_config": {"fp8ext": {"canary": {"prompts": [[1, 2]]}}}},
        "a canary's prompts for a pooling model: it has no logits",
    ),
    "latent attention with an indexer": (
        {"model": "mla", "hf_overrides": {"index_topk": 64}},
        "sparse latent attention (index_topk): new weights could not be tried without its indexer",
    ),
    "latent attention whose weights AMX packs away": (
        {"model": "mla", "amx": True},
        "expected --attention-backend CPU_MLA; or the environment variable VLLM_MLA_DISABLE=1, which expands",
    ),
    "latent attention on ranks that share out tokens": (
        {"model": "mla", "attention_backend": "CPU_MLA", "dcp": 2},
        "--decode-context-parallel-size > 1 with latent attention (MLA): each rank copies the others' weights",
    ),
    "Llama 4": ({"model": "llama4"}, "Llama 4: vLLM's loader sorts the rows of q_proj and k_proj anew"),
    "dev mode": (
        {"VLLM_SERVER_DEV_MODE": "1"},
        "it opens weight routes that need no key, which this plugin's replace; expected fp8ext among VLLM_PLUGINS",
    ),
    "weight transfer by another engine": (
        {"weight_transfer_config": {"backend": "sparse_nccl"}},
        "--weight-transfer-config: expected backend nccl or ipc, found sparse_nccl",
    ),
    "addresses that are none": (
        {"additional_config": {"fp8ext": {"trusted_clients": ["everybody"]}}},
        "expected an address or a range such as 10.0.0.0/8",
    ),
    "dev mode without updates": (
        {"VLLM_SERVER_DEV_MODE": "1", "additional_config": {"fp8ext": {"staging": "none"}}},
        "it opens weight routes that need no key",
    ),
    "a key that nobody could send": (
        {ADMIN_KEY: "schlüssel"},
        f"{ADMIN_KEY}: expected a key of printable ASCII characters",
    ),
    "scales of a 16-bit KV cache": (
        {"additional_config": {"fp8ext": {"kv_scales": "calibrate"}}},
        "expected --kv-cache-dtype fp8, found auto",
    ),
    "logits in fp32 whatever the batch": (
        {"additional_config": {"fp8ext": {"lm_head": "fp32", "kernels": {"batch_invariant": True}}}},
        "lm_head fp32 with kernels.batch_invariant: cuBLAS",
    ),
    "logits in fp32 and in another dtype": (
        {"hf_overrides": {"head_dtype": "model"}, "additional_config": {"fp8ext": {"lm_head": "fp32"}}},
        "lm_head fp32: expected head_dtype float32 in --hf-overrides, or none, found model",
    ),
    "logits in fp32 without the feature": (
        {"additional_config": {"fp8ext": {"lm_head": "fp32", "features_off": ["fp32_head"]}}},
        "lm_head fp32: the feature fp32_head is off, the settings: features_off: expected lm_head bf16",
    ),
    "logits of a pooling model": (
        {"runner": "pooling", "additional_config": {"fp8ext": {"lm_head": "fp32"}}},
        "lm_head fp32 for a pooling model, which has no output layer",
    ),
    "an output layer in FP8 and in fp32": (
        {"hf_overrides": {"head_dtype": "float32"}, "additional_config": {"fp8ext": {"lm_head": "blockfp8"}}},
        "lm_head blockfp8: expected no head_dtype in the model's configuration or --hf-overrides, found float32",
    ),
    "several at once": (
        {"VLLM_SERVER_DEV_MODE": "1", "enable_ep_weight_filter": True, "cpu_offload_gb": 1},
        "blockfp8 can't be combined with:\n"
        "  VLLM_SERVER_DEV_MODE=1 without VLLM_PLUGINS=fp8ext: it opens weight routes that need no key, which this plugin's "
        "replace; expected fp8ext among VLLM_PLUGINS, or the variable unset\n"
        "blockfp8 with live updates can't be combined with:\n"
        "  CPU offload: offloaded weights have no address to exchange\n"
        "  --enable-ep-weight-filter: no rank would know the names of the others' experts\n"
        'Without live updates (--additional-config \'{"fp8ext": {"staging": "none"}}\') the latter are not refused.',
    ),
    "unknown setting": ({"additional_config": {"fp8ext": {"stagign": "none"}}}, "stagign: unknown key"),
    "wrong setting": ({"additional_config": {"fp8ext": {"canary": {}}}}, "canary.prompts"),
}
TAKEN: dict[str, dict[str, Any]] = {
    "dev mode beside this plugin": {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "other,fp8ext"},
    "weight transfer": {"weight_transfer_config": {"backend": "nccl"}},
    "nothing special": {},
    "a draft model that keeps its weights": {
        "speculative_config": {"model": str(LATE), "num_speculative_tokens": 2},
        "additional_config": {"fp8ext": {"draft_weights": "keep"}},
    },
    "drafts of n-grams": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    },
    "data parallel ranks of one server": {"data_parallel_size": 2},
    "pipeline stages": {"pipeline_parallel_size": 2},
    "scales of an FP8 KV cache": {
        "kv_cache_dtype": "fp8",
        "additional_config": {"fp8ext": {"kv_scales": "calibrate"}},
    },
    "latent attention": {"model": "mla", "attention_backend": "CPU_MLA"},
    "latent attention by a CPU without AMX": {"model": "mla", "amx": False},
    "latent attention, expanded": {"model": "mla", "VLLM_MLA_DISABLE": "1", "amx": True},
    "latent attention with an indexer, without updates": {
        "model": "mla",
        "attention_backend": "CPU_MLA",
        "hf_overrides": {"index_topk": 64},
        "additional_config": {"fp8ext": {"staging": "none"}},
    },
    "logits in fp32": {
        "hf_overrides": {"head_dtype": "float32"},
        "additional_config": {"fp8ext": {"lm_head": "fp32"}},
    },
    "an output layer in FP8": {"additional_config": {"fp8ext": {"lm_head": "blockfp8"}}},
    "LoRA": {"enable_lora": True},
    "LoRA of experts without updates": {
        "model": "experts",
        "enable_lora": True,
        "additional_config": {"fp8ext": {"staging": "none"}},
    },
}

SCRIPT = """
import json, os, sys
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
has_amx = torch.cpu._is_amx_tile_supported()
answers = {}
for name, options in json.load(sys.stdin).items():
    aside = ("_api_process_count", "enable_eplb", "amx", "dcp", "external_lb", "sleep")
    later = {key: options.pop(key) for key in aside if key in options}
    torch.cpu._is_amx_tile_supported = lambda later=later: later.get("amx", has_amx)
    os.environ.update({key: options.pop(key) for key in list(options) if key.isupper()})
    try:
        args = AsyncEngineArgs(quantization="blockfp8", max_model_len=256, **options)
        if "_api_process_count" in later:
            args._api_process_count = later["_api_process_count"]
        config = args.create_engine_config()
        if {"enable_eplb", "dcp", "external_lb", "sleep"} & later.keys():  # vLLM itself takes them on GPUs, or from servers
            from vllm_fp8ext.compat.unsupported_options import refuse_unsupported
            from vllm_fp8ext.config import Settings
            config.parallel_config.enable_eplb = later.get("enable_eplb", False)
            config.parallel_config.decode_context_parallel_size = later.get("dcp", 1)
            config.parallel_config.data_parallel_external_lb = later.get("external_lb", False)
            config.model_config.enable_sleep_mode = later.get("sleep", False)
            refuse_unsupported(config, Settings.parse(config.additional_config))
        answers[name] = ""
    except Exception as error:
        answers[name] = f"{type(error).__name__}: {error}"
    for key in ("VLLM_SERVER_DEV_MODE", "VLLM_PLUGINS", "VLLM_MLA_DISABLE", "FP8EXT_ADMIN_KEY"):
        os.environ.pop(key, None)
json.dump(answers, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What making each configuration came to, in a process where vLLM loads the plugin by itself."""
    folder = tmp_path_factory.mktemp("refusals")
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DeepseekV2Config(
        **latent, **shape, v_head_dim=16, vocab_size=128, architectures=["DeepseekV2ForCausalLM"]
    )
    config.save_pretrained(folder / "mla")
    llama4 = Llama4TextConfig(**shape, vocab_size=128, architectures=["Llama4ForCausalLM"])
    llama4.save_pretrained(folder / "llama4")
    experts = Qwen3MoeConfig(
        **shape,
        num_experts=4,
        moe_intermediate_size=128,
        vocab_size=128,
        architectures=["Qwen3MoeForCausalLM"],
    )
    experts.save_pretrained(folder / "experts")
    cases = {name: dict(options) for name, (options, _) in REFUSED.items()} | TAKEN
    for options in cases.values():
        options["model"] = str(folder / options["model"] if "model" in options else EARLY)
    out = folder / "answers.json"
    done = run(
        [sys.executable, "-P", "-c", SCRIPT, str(out)],
        input=json.dumps(cases),
        env={**os.environ, "VLLM_PLUGINS": "fp8ext"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(Path(out).read_text())
    return found


@pytest.mark.parametrize("case", REFUSED)
def test_refused(answers: dict[str, str], case: str):
    assert answers[case].startswith("ConfigError"), answers[case]
    assert REFUSED[case][1] in answers[case]


@pytest.mark.parametrize("case", TAKEN)
def test_taken(answers: dict[str, str], case: str):
    assert answers[case] == ""

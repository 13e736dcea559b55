# SPDX-License-Identifier: Apache-2.0
"""Shapes and roles of parameters, from configs alone; what has no plan says why."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors import safe_open

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.memory_plan.model import Model, Role, read_model, shapes

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 128}


def roles(model: Model) -> dict[str, Role]:
    """By name, of the first layer and what is outside of layers."""
    return {p.name: p.role for p in model.parameters if ".1." not in p.name}


@pytest.mark.parametrize("where", [EARLY, EARLY / "config.json"])
def test_parameters_are_those_of_the_checkpoint(where: Path) -> None:
    with safe_open(EARLY / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    model = read_model(str(where))
    assert {p.name: p.shape for p in model.parameters} == stored
    assert (model.heads, model.kv_heads, model.head_dim, model.hidden, model.width) == (4, 2, 64, 256, 640)
    assert (model.vocabulary, model.max_context, model.windows) == (128, 2048, (None,) * 3)


def test_the_config_alone_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((EARLY / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    assert read_model(str(tmp_path)).parameters == read_model(str(EARLY)).parameters


def test_a_block_fp8_checkpoint_has_the_same_shapes(tmp_path: Path) -> None:
    config = json.loads((EARLY / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(str(tmp_path)).parameters == read_model(str(EARLY)).parameters


def llama(kind: str, **scaling: float) -> transformers.PretrainedConfig:
    rotary = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 512, **scaling}
    return transformers.LlamaConfig(
        **SMALL, rope_parameters=rotary, max_position_embeddings=2048, architectures=["LlamaForCausalLM"]
    )


def gemma() -> transformers.PretrainedConfig:
    rotary = {"rope_theta": 1e4, "rope_type": "default"}
    return transformers.Gemma3TextConfig(
        **SMALL,
        rope_parameters={
            "sliding_attention": rotary,
            "full_attention": {**rotary, "rope_type": "linear", "factor": 8.0},
        },
        max_position_embeddings=2048,
        architectures=["Gemma3ForCausalLM"],
    )


@pytest.mark.parametrize(
    "config",
    [
        llama("default"),
        llama("linear", factor=4.0),
        llama("dynamic", factor=4.0),
        llama("yarn", factor=4.0),
        llama("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        gemma(),
    ],
    ids=["default", "linear", "dynamic", "yarn", "llama3", "gemma3"],
)
def test_the_longest_context_is_vllms(config: transformers.PretrainedConfig, tmp_path: Path) -> None:
    from vllm.config import ModelConfig

    config.save_pretrained(tmp_path)
    served = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True)
    assert read_model(str(tmp_path)).max_context == served.max_model_len


def test_roles_of_a_dense_model_with_biases() -> None:
    result = roles(shapes(transformers.Qwen2Config(**SMALL, tie_word_embeddings=False), "qwen2"))
    attention = "model.layers.0.self_attn"
    assert result == {
        "model.embed_tokens.weight": Role.EMBEDDING,
        "lm_head.weight": Role.EMBEDDING,
        f"{attention}.q_proj.weight": Role.PROJECTION,
        f"{attention}.k_proj.weight": Role.KV_PROJECTION,
        f"{attention}.v_proj.weight": Role.KV_PROJECTION,
        f"{attention}.o_proj.weight": Role.PROJECTION,
        **{f"{attention}.{name}_proj.bias": Role.KEPT for name in "qkv"},
        **{f"model.layers.0.mlp.{name}_proj.weight": Role.PROJECTION for name in ("gate", "up", "down")},
        "model.layers.0.input_layernorm.weight": Role.KEPT,
        "model.layers.0.post_attention_layernorm.weight": Role.KEPT,
        "model.norm.weight": Role.KEPT,
    }


def test_tied_embeddings_are_one() -> None:
    tied = shapes(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True), "llama")
    assert [p.name for p in tied.parameters if p.role is Role.EMBEDDING] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    "config",
    [
        transformers.MixtralConfig(**SMALL, num_local_experts=4),
        transformers.Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=128),
        transformers.Qwen2MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=128),
        transformers.GptOssConfig(**SMALL, num_local_experts=4),
        transformers.Glm4MoeConfig(
            **SMALL, n_routed_experts=4, moe_intermediate_size=128, first_k_dense_replace=0
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_roles_of_experts_and_routers(config: Any) -> None:
    model = shapes(config, "moe")
    result = roles(model)
    experts = {name for name in result if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    routers = {
        name for name in result if name.rpartition(".")[0].endswith((".gate", ".router", "_expert_gate"))
    }
    assert len(experts) == 2
    assert routers
    assert {result[name] for name in experts} == {Role.PROJECTION}
    assert {result[name] for name in routers} == {Role.KEPT}
    assert not [name for name, role in result.items() if role is not Role.KEPT and name.endswith("bias")]
    assert model.experts_per_token == config.num_experts_per_tok


def test_positions_that_are_learned_are_kept() -> None:
    config = transformers.GPT2Config(n_embd=256, n_layer=1, n_head=4, vocab_size=128)
    result = roles(shapes(config, "gpt2"))
    assert result["transformer.wte.weight"] is Role.EMBEDDING
    assert result["transformer.wpe.weight"] is Role.KEPT
    assert result["transformer.h.0.attn.c_attn.weight"] is Role.PROJECTION


@pytest.mark.parametrize(("new", "kv_heads"), [(False, 1), (True, 2)])
def test_kv_heads_of_falcon(new: bool, kv_heads: int) -> None:
    config = transformers.FalconConfig(
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=new,
    )
    assert shapes(config, "falcon").kv_heads == kv_heads


def test_windows() -> None:
    mistral = shapes(transformers.MistralConfig(**SMALL, sliding_window=64), "mistral")
    gemma = shapes(transformers.Gemma2Config(**SMALL, head_dim=64, sliding_window=64), "gemma")
    assert (mistral.windows, gemma.windows) == ((64, 64), (64, None))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.DeepseekV32Config(), "sparse attention"),
        (transformers.Qwen3NextConfig(), "neither full nor sliding-window attention: linear_attention"),
        (transformers.MambaConfig(), "its config names no attention heads"),
        (transformers.T5Config(), "it has an encoder"),
        (transformers.Gemma3Config(), "parts beside the language model"),
        (transformers.Gemma4TextConfig(num_kv_shared_layers=2), "layers that share a KV cache"),
        (transformers.Gemma4TextConfig(num_kv_shared_layers=0), "it.*: .head_dim. is a per-layer attribute"),
        (transformers.MiMoV2FlashConfig(), "v_proj.weight has 512 rows, where KV heads and head_dim say 768"),
        (transformers.BloomConfig(), "no attribute 'max_position_embeddings'"),
        (transformers.ViTConfig(), "no plan for it .vit.: Unrecognized configuration"),
        (transformers.LlamaConfig(**SMALL | {"vocab_size": -1}), "no plan for it .llama.: "),
    ],
    ids=lambda case: getattr(case, "model_type", ""),
)
def test_no_plan(config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        shapes(config, "it")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not a model's config: JSONDecodeError"),
        ("[]", "is not a model's config: TypeError"),
        ('{"hidden_size": 4}', "is not a model's config: KeyError: 'model_type'"),
        ('{"model_type": "unheard_of"}', "unknown architecture 'unheard_of'"),
        ('{"model_type": "qwen3", "hidden_size": "wide"}', "hidden_size"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_model(str(tmp_path))


def test_no_config(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "missing", tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match="there is no"):
            read_model(str(where))

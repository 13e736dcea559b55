# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of the families that RL trains, made by transformers from configurations alone.

A family is a line in `ZOO`: its name, its kind, and the classes and sizes that make it. Nothing here imports vLLM.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from families import ENDS, TEXT, gemma3, paligemma, qwen2_5_vl
from zoo_processors import (
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    write_qwen_vl,
    write_tokenizer,
)

DENSE, EXPERTS, HYBRID, TOWER = "dense", "experts", "hybrid", "tower"
"""Kinds: by what a layer has beside attention and one MLP."""
POOLING = "pooling"
"""Reward models and classifiers: no logits of tokens."""
KINDS = (DENSE, EXPERTS, HYBRID, TOWER, POOLING)

PLAIN = {name: size for name, size in TEXT.items() if name != "head_dim"}
"""Sizes of a family whose configuration has no size of heads."""
SOME_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
NO_TIE = {"tie_word_embeddings": False}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One line of the zoo.

    `known_as`: models that are of it. `architecture`: transformers' class, or a function that makes the model. `sizes`: what
    its configuration gets. `without_head_dim`: the configuration derives the size of heads. `needs_torchvision`:
    vLLM reads it with that alone. `refused`: what the message of a refusal holds, where the start is refused as it must be.
    """

    name: str
    known_as: str
    kind: str
    architecture: Any
    sizes: dict[str, Any] = field(default_factory=dict)
    without_head_dim: bool = False
    needs_torchvision: bool = False
    refused: str | None = None
    needs_gpu: str | None = None
    """Why vLLM's CPU build can't serve it."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the engine is started with beside the usual."""
    processor: Callable[[Path], None] | None = None
    """What writes a tokenizer, or more, beside the checkpoint."""
    image: list[int] | None = None
    """Tokens of a prompt with an image."""

    def make(self) -> Any:
        """Make the model, its weights as transformers initializes them."""
        if callable(self.architecture):
            return self.architecture()
        made = getattr(transformers, self.architecture)
        base = PLAIN if self.without_head_dim else TEXT
        return made(made.config_class(**{**base, **ENDS, **self.sizes}))

    def write(self, folder: Path, seed: int) -> dict[str, torch.Tensor]:
        """Write a checkpoint of random BF16 weights; returns the model's own tensors by transformers' names."""
        torch.manual_seed(seed)
        model = self.make().to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            mean = 1.0 if parameter.dim() == 1 and not name.endswith(("bias", "A_log")) else 0.0
            torch.nn.init.normal_(parameter, mean, 0.05)
        model.save_pretrained(folder)
        if self.processor is not None:
            self.processor(folder)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


FP8_KV = {"kv_cache_dtype": "fp8", "additional_config": {"fp8ext": {"kv_scales": "calibrate"}}}


def _dense() -> list[Family]:
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    return [
        Family(
            name="llama",
            known_as="Llama 3, DeepSeek-R1-Distill-Llama",
            kind=DENSE,
            architecture="LlamaForCausalLM",
            sizes=NO_TIE,
        ),
        Family(
            name="qwen2",
            known_as="Qwen2, Qwen2.5",
            kind=DENSE,
            architecture="Qwen2ForCausalLM",
            without_head_dim=True,
        ),
        Family(name="qwen3", known_as="Qwen3", kind=DENSE, architecture="Qwen3ForCausalLM", sizes=NO_TIE),
        Family(
            name="gemma2",
            known_as="Gemma 2",
            kind=DENSE,
            architecture="Gemma2ForCausalLM",
            sizes={"sliding_window": 64, "query_pre_attn_scalar": 64},
        ),
        Family(
            name="gemma3_text",
            known_as="Gemma 3, text",
            kind=DENSE,
            architecture="Gemma3ForCausalLM",
            sizes={**windows, "query_pre_attn_scalar": 64},
        ),
        Family(
            name="mistral",
            known_as="Mistral, Ministral",
            kind=DENSE,
            architecture="MistralForCausalLM",
            sizes={**NO_TIE, "sliding_window": None},
        ),
        Family(
            name="phi3",
            known_as="Phi-3, Phi-4",
            kind=DENSE,
            architecture="Phi3ForCausalLM",
            sizes=NO_TIE,
            without_head_dim=True,
        ),
        Family(
            name="olmo2",
            known_as="OLMo 2",
            kind=DENSE,
            architecture="Olmo2ForCausalLM",
            sizes=NO_TIE,
            without_head_dim=True,
        ),
        Family(
            name="olmo3",
            known_as="OLMo 3",
            kind=DENSE,
            architecture="Olmo3ForCausalLM",
            sizes={**NO_TIE, **windows},
            without_head_dim=True,
        ),
        Family(name="glm4", known_as="GLM-4", kind=DENSE, architecture="Glm4ForCausalLM", sizes=NO_TIE),
        Family(
            name="granite",
            known_as="Granite 3",
            kind=DENSE,
            architecture="GraniteForCausalLM",
            without_head_dim=True,
        ),
        Family(
            name="smollm3",
            known_as="SmolLM3",
            kind=DENSE,
            architecture="SmolLM3ForCausalLM",
            without_head_dim=True,
        ),
        Family(
            name="seed_oss",
            known_as="Seed-OSS",
            kind=DENSE,
            architecture="SeedOssForCausalLM",
            sizes=NO_TIE,
        ),
        Family(
            name="exaone4",
            known_as="EXAONE-4",
            kind=DENSE,
            architecture="Exaone4ForCausalLM",
            sizes={"sliding_window": 64, "sliding_window_pattern": 2},
            without_head_dim=True,
        ),
        Family(
            name="ernie4_5",
            known_as="ERNIE-4.5",
            kind=DENSE,
            architecture="Ernie4_5ForCausalLM",
        ),
        Family(
            name="hunyuan",
            known_as="HunYuan, dense",
            kind=DENSE,
            architecture="HunYuanDenseV1ForCausalLM",
        ),
        Family(
            name="starcoder2",
            known_as="Starcoder2",
            kind=DENSE,
            architecture="Starcoder2ForCausalLM",
            without_head_dim=True,
        ),
    ]


def _experts() -> list[Family]:
    shared = {"shared_expert_intermediate_size": 128, "decoder_sparse_step": 1}
    return [
        Family(
            name="olmoe",
            known_as="OLMoE",
            kind=EXPERTS,
            architecture="OlmoeForCausalLM",
            sizes={**NO_TIE, "num_experts": 4, "num_experts_per_tok": 2},
            without_head_dim=True,
        ),
        Family(
            name="qwen2_moe",
            known_as="Qwen1.5-MoE, Qwen2-MoE",
            kind=EXPERTS,
            architecture="Qwen2MoeForCausalLM",
            sizes={**NO_TIE, **SOME_EXPERTS, **shared},
            without_head_dim=True,
        ),
        Family(
            name="qwen3_moe",
            known_as="Qwen3-MoE (30B-A3B, 235B-A22B)",
            kind=EXPERTS,
            architecture="Qwen3MoeForCausalLM",
            sizes={**NO_TIE, **SOME_EXPERTS},
        ),
        Family(
            name="mixtral",
            known_as="Mixtral",
            kind=EXPERTS,
            architecture="MixtralForCausalLM",
            sizes={
                **NO_TIE,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": None,
                "intermediate_size": 384,
            },
        ),
        Family(
            name="glm4_moe",
            known_as="GLM-4.5, GLM-4.6",
            kind=EXPERTS,
            architecture="Glm4MoeForCausalLM",
            sizes={
                **NO_TIE,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 128,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            },
        ),
    ]


AN_IMAGE = [5, 6, VISION_START, IMAGE, VISION_END, 7, 8]
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
"""Sizes of Gated DeltaNet beside attention."""
VISION_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def _qwen3_tower(**more: Any) -> dict[str, Any]:
    sizes = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 16}
    return {**sizes, "out_hidden_size": 256, "num_position_embeddings": 256, **more}


def _qwen3_vl() -> Any:
    rope = {
        "rope_type": "default",
        "mrope_section": [8, 12, 12],
        "mrope_interleaved": True,
        "rope_theta": 1e4,
    }
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, **ENDS, "rope_parameters": rope, **NO_TIE},
        vision_config=_qwen3_tower(deepstack_visual_indexes=[0]),
        **VISION_TOKENS,
        **NO_TIE,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen3_5_vl() -> Any:
    config = transformers.Qwen3_5Config(
        text_config={**TEXT, **ENDS, **DELTA, **NO_TIE},
        vision_config=_qwen3_tower(),
        **VISION_TOKENS,
        **NO_TIE,
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _latent() -> list[Family]:
    """Latent attention, with the only latent that the CPU's attention takes; a CPU with AMX would pack its weights away."""
    heads = {"num_key_value_heads": 4, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    shared = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    shared |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
    sizes = {**NO_TIE, **heads, **shared, "kv_lora_rank": 512}
    groups = {"q_lora_rank": 128, "n_group": 4, "topk_group": 2}
    scores = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    greedy = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    options = {"attention_backend": "CPU_MLA"}
    return [
        Family(
            name=name,
            known_as=known_as,
            kind=EXPERTS,
            architecture=architecture,
            sizes={**sizes, **more},
            without_head_dim=True,
            options=options,
        )
        for name, known_as, architecture, more in (
            ("deepseek_v2", "DeepSeek-V2, V2-Lite", "DeepseekV2ForCausalLM", greedy),
            ("deepseek_v3", "DeepSeek-V3, Kimi-K2, Moonlight", "DeepseekV3ForCausalLM", groups | scores),
            ("glm4_moe_lite", "GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", groups),
        )
    ]


def _odd_experts() -> list[Family]:
    """Experts that are fused in the checkpoint, stay in 16 bits, or have an odd router."""
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    chosen = {**NO_TIE, "num_experts_per_tok": 2, "num_local_experts": 4}
    return [
        Family(
            name="gpt_oss",
            known_as="gpt-oss",
            kind=EXPERTS,
            architecture="GptOssForCausalLM",
            sizes={**chosen, **windows, "intermediate_size": 384},
        ),
        Family(
            name="granite_moe",
            known_as="GraniteMoE",
            kind=EXPERTS,
            architecture="GraniteMoeForCausalLM",
            sizes=chosen,
            without_head_dim=True,
        ),
        Family(
            name="gemma4_moe",
            known_as="Gemma 4 26B-A4B, text",
            kind=EXPERTS,
            architecture="Gemma4ForCausalLM",
            sizes={
                **windows,
                "global_head_dim": 64,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 384,
                "enable_moe_block": True,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
            },
        ),
        Family(
            name="ernie4_5_moe",
            known_as="ERNIE-4.5-MoE",
            kind=EXPERTS,
            architecture="Ernie4_5_MoeForCausalLM",
            sizes={
                **NO_TIE,
                "moe_k": 2,
                "moe_num_experts": 4,
                "moe_intermediate_size": 128,
                "moe_num_shared_experts": 1,
                "moe_layer_start_index": 1,
                "moe_layer_end_index": 1,
            },
            without_head_dim=True,
        ),
        Family(
            name="minimax_m2",
            known_as="MiniMax-M2, with a softmax router",
            kind=EXPERTS,
            architecture="MiniMaxM2ForCausalLM",
            # vLLM's CPU build has no sigmoid without groups
            sizes={**chosen, "use_routing_bias": True, "scoring_func": "softmax", "intermediate_size": 384},
            options={"hf_overrides": {"rotary_dim": 32}},
        ),
        Family(
            name="lfm2_moe",
            known_as="LFM2-MoE",
            kind=HYBRID,
            architecture="Lfm2MoeForCausalLM",
            sizes={
                **SOME_EXPERTS,
                "layer_types": ["conv", "full_attention"],
                "num_dense_layers": 1,
            },
            without_head_dim=True,
        ),
        Family(
            name="glm_moe_dsa",
            known_as="GLM-5, sparse attention (DSA)",
            kind=EXPERTS,
            architecture="GlmMoeDsaForCausalLM",
            sizes={
                **NO_TIE,
                "num_key_value_heads": 4,
                "q_lora_rank": 128,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 64,
                "qk_rope_head_dim": 64,
                "v_head_dim": 64,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 128,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "index_topk": 64,
                "index_n_heads": 4,
                "index_head_dim": 128,
            },
            without_head_dim=True,
            refused="sparse latent attention (index_topk)",
        ),
        Family(
            name="kimi_linear",
            known_as="Kimi-Linear",
            kind=HYBRID,
            architecture="KimiLinearForCausalLM",
            sizes={
                **NO_TIE,
                "num_key_value_heads": 4,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 64,
                "qk_rope_head_dim": 64,
                "v_head_dim": 64,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 128,
                "n_shared_experts": 1,
                "linear_head_dim": 64,
                "linear_num_heads": 4,
                "layer_types": ["linear_attention", "full_attention"],
                "mlp_layer_types": ["dense", "sparse"],
            },
            without_head_dim=True,
            needs_gpu="vLLM's model imports CUTLASS, which its CPU build lacks",
        ),
        Family(
            name="llama4",
            known_as="Llama 4, text",
            kind=EXPERTS,
            architecture="Llama4ForCausalLM",
            sizes={
                **chosen,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 256,
                "interleave_moe_layer_step": 1,
            },
            refused="vLLM's loader sorts the rows of q_proj and k_proj anew",
        ),
    ]


def _towers() -> list[Family]:
    return [
        Family(name="paligemma", known_as="PaliGemma", kind=TOWER, architecture=paligemma),
        Family(
            name="gemma3", known_as="Gemma 3, images", kind=TOWER, architecture=gemma3, needs_torchvision=True
        ),
        Family(
            name="qwen2_5_vl",
            known_as="Qwen2.5-VL",
            kind=TOWER,
            architecture=qwen2_5_vl,
            needs_torchvision=True,
            processor=write_qwen_vl,
            image=AN_IMAGE,
        ),
        Family(
            name="qwen3_vl",
            known_as="Qwen3-VL",
            kind=TOWER,
            architecture=_qwen3_vl,
            needs_torchvision=True,
            processor=partial(write_qwen_vl, processor="Qwen3VLProcessor", patch=16),
            image=AN_IMAGE,
        ),
        Family(
            name="qwen3_5_vl",
            known_as="Qwen3.5, as released",
            kind=TOWER,
            architecture=_qwen3_5_vl,
            needs_torchvision=True,
            processor=partial(write_qwen_vl, processor="Qwen3VLProcessor", patch=16),
            image=AN_IMAGE,
        ),
    ]


def _hybrids() -> list[Family]:
    routed = {**SOME_EXPERTS, "shared_expert_intermediate_size": 128}
    shared = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_global_key_value_heads": 2,
        "global_head_dim": 64,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 128,
        "sliding_window": 64,
    }
    # vLLM's CPU build can't cache states of Mamba2 inside a prompt: the engine ends
    uncached = {"enable_prefix_caching": False}
    mamba = {
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 2,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
    }
    return [
        Family(
            name="qwen3_next",
            known_as="Qwen3-Next",
            kind=HYBRID,
            architecture="Qwen3NextForCausalLM",
            sizes={**NO_TIE, **DELTA, **routed},
        ),
        Family(
            name="qwen3_5",
            known_as="Qwen3.5, dense, text",
            kind=HYBRID,
            needs_torchvision=True,
            architecture="Qwen3_5ForCausalLM",
            sizes={**NO_TIE, **DELTA},
        ),
        Family(
            name="qwen3_5_moe",
            known_as="Qwen3.5-MoE, text",
            kind=HYBRID,
            needs_torchvision=True,
            architecture="Qwen3_5MoeForCausalLM",
            sizes={**NO_TIE, **DELTA, **routed},
        ),
        Family(
            name="nemotron_h",
            known_as="Nemotron-H",
            kind=HYBRID,
            architecture="NemotronHForCausalLM",
            sizes={
                **NO_TIE,
                "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
                "num_hidden_layers": 4,
                "mamba_num_heads": 8,
                "mamba_head_dim": 64,
                "n_groups": 2,
                "ssm_state_size": 32,
                "conv_kernel": 4,
            },
            options=uncached,
        ),
        Family(
            name="granite_h",
            known_as="Granite-4-H",
            kind=HYBRID,
            architecture="GraniteMoeHybridForCausalLM",
            sizes={
                **mamba,
                "mamba_expand": 2,
                "layer_types": ["mamba", "attention"],
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "shared_intermediate_size": 256,
                "position_embedding_type": "rope",
            },
            without_head_dim=True,
            options=uncached,
        ),
        Family(
            name="falcon_h1",
            known_as="Falcon-H1",
            kind=HYBRID,
            architecture="FalconH1ForCausalLM",
            sizes={**mamba, "mamba_d_ssm": 512, "mamba_expand": 2},
            options=uncached,
        ),
        Family(
            name="gemma4_e",
            known_as="Gemma 4 E, text",
            kind=HYBRID,
            architecture="Gemma4ForCausalLM",
            sizes=shared,
        ),
        Family(
            name="gemma4_e_fp8_kv",
            known_as="Gemma 4 E, text, FP8 KV cache",
            kind=HYBRID,
            architecture="Gemma4ForCausalLM",
            sizes=shared,
            options=FP8_KV,
        ),
        Family(
            name="qwen3_next_fp8_kv",
            known_as="Qwen3-Next, FP8 KV cache",
            kind=HYBRID,
            architecture="Qwen3NextForCausalLM",
            sizes={**NO_TIE, **DELTA, **routed},
            options=FP8_KV,
        ),
        Family(
            name="lfm2",
            known_as="LFM2",
            kind=HYBRID,
            architecture="Lfm2ForCausalLM",
            sizes={
                "layer_types": ["conv", "full_attention"],
                "conv_dim": 256,
                "block_dim": 256,
                "block_ff_dim": 256,
            },
            without_head_dim=True,
        ),
    ]


def _pooling() -> list[Family]:
    return [
        Family(
            name="qwen3_reward",
            known_as="reward models on Qwen3 (Skywork-Reward-V2)",
            kind=POOLING,
            processor=write_tokenizer,
            architecture="Qwen3ForSequenceClassification",
            sizes={"num_labels": 1},
        ),
        Family(
            name="llama_reward",
            known_as="reward models on Llama 3",
            kind=POOLING,
            processor=write_tokenizer,
            architecture="LlamaForSequenceClassification",
            sizes={"num_labels": 1},
        ),
        Family(
            name="qwen2_classes",
            known_as="classifiers on Qwen2.5",
            kind=POOLING,
            processor=write_tokenizer,
            architecture="Qwen2ForSequenceClassification",
            sizes={"num_labels": 3},
            without_head_dim=True,
        ),
    ]


ZOO: dict[str, Family] = {
    family.name: family
    for family in [
        *_dense(),
        *_experts(),
        *_latent(),
        *_odd_experts(),
        *_hybrids(),
        *_towers(),
        *_pooling(),
    ]
}

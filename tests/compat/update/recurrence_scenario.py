# SPDX-License-Identifier: Apache-2.0
"""Layers with states of small models: vLLM's own forward, over its cache of states, beside the shadow's. Takes a file,
to which it writes how far apart the outputs are, as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata

from vllm_fp8ext.compat.update import cpu_conv
from vllm_fp8ext.compat.update.shadow_recurrence import recur_plainly
from vllm_fp8ext.layers.linear import KeptLinearMethod

LENGTHS = [70, 1, 9]
"""Of prompts in one step: more than a chunk, one token, a few."""
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", DELTA),
    "qwen3_next": ("Qwen3NextForCausalLM", DELTA | {"num_experts": 4, "moe_intermediate_size": 128}),
    "falcon_h1": ("FalconH1ForCausalLM", MAMBA | {"mamba_d_ssm": 512}),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "n_groups": 2},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"], "conv_dim": 256, "block_dim": 256, "block_ff_dim": 256},
    ),
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def built(folder: Path, name: str) -> tuple[VllmConfig, nn.Module]:
    """A small model with random weights, of this layer of which is read."""
    architecture, sizes = MODELS[name]
    made = getattr(transformers, architecture).config_class(**SIZES, **sizes)
    made.architectures = [architecture]
    made.dtype = "bfloat16"
    made.save_pretrained(folder / name)
    config = EngineArgs(
        model=str(folder / name), skip_tokenizer_init=True, max_model_len=256, dtype="bfloat16"
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(vllm_config=config)
    torch.manual_seed(0)
    for path, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if path.endswith("norm.weight") else 0.0, 0.1)
        if path.endswith(".A"):
            parameter.data.copy_(-torch.exp(parameter))
    return config, model


def metadata(layer: MambaBase) -> Any:
    """Of one step that reads all prompts from their begin."""
    tokens, count = sum(LENGTHS), len(LENGTHS)
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    slots = torch.arange(1, count + 1, dtype=torch.int32)
    fresh = torch.zeros(count, dtype=torch.bool)
    kind = type(layer).__name__
    if kind == "QwenGatedDeltaNetAttention":
        return GDNAttentionMetadata(
            num_prefills=count,
            num_prefill_tokens=tokens,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=tokens,
            has_initial_state=fresh,
            non_spec_query_start_loc=starts,
            non_spec_state_indices_tensor=slots,
        )
    common: dict[str, Any] = {
        "num_prefills": count,
        "num_prefill_tokens": tokens,
        "num_decodes": 0,
        "num_decode_tokens": 0,
        "num_reqs": count,
        "has_initial_states_p": fresh,
        "query_start_loc_p": starts,
        "state_indices_tensor_p": slots,
        "state_indices_tensor_d": None,
        "query_start_loc_d": None,
        "num_accepted_tokens": None,
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
    }
    if kind == "ShortConv":
        return ShortConvAttentionMetadata(**common)
    each = torch.arange(count, dtype=torch.int32)
    return Mamba2AttentionMetadata(
        **common, chunk_size=256, seq_idx_p=each, last_chunk_indices_p=each, cu_chunk_seqlen_p=starts
    )


def run(layer: Any, hidden: Tensor) -> Tensor:
    """Call a layer, whether it returns its output or is given a tensor for it."""
    if type(layer).__name__ == "ShortConv":
        output = torch.zeros_like(hidden)
        layer(hidden, output)
        return output
    out: Tensor = layer(hidden)
    return out


def scenario(folder: Path, name: str, *, kept: bool) -> dict[str, float]:
    """Outputs of both forwards. `kept`: the layer's projections stay readable, as those of a served model do."""
    config, model = built(folder, name)
    layer = next(module for module in model.modules() if isinstance(module, MambaBase))
    hidden = torch.randn(sum(LENGTHS), SIZES["hidden_size"], dtype=torch.bfloat16)
    original: Any = layer.forward
    projections = {
        module: module.quant_method for module in layer.modules() if isinstance(module, LinearBase)
    }
    for module in projections:
        module.quant_method = KeptLinearMethod()
        module.quant_method.process_weights_after_loading(module)
    recur_plainly(layer, lambda: None, LENGTHS)
    with torch.inference_mode():
        ours = run(layer, hidden)
        alone = []
        for part in hidden.split(LENGTHS):
            recur_plainly(layer, lambda: None)
            alone.append(run(layer, part))
    layer.forward = original
    for module, method in [] if kept else projections.items():
        module.quant_method, module.weight.fp8ext_kept = method, False
        method.process_weights_after_loading(module)
    shapes, dtypes = layer.get_state_shape(), layer.get_state_dtype()
    layer.kv_cache = tuple(
        torch.full((len(LENGTHS) + 1, *shape), 7.0, dtype=dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    with torch.inference_mode(), set_forward_context({layer.prefix: metadata(layer)}, config):
        theirs = run(layer, hidden)
    difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    return {
        "relative error": float(difference),
        "prompts alone": float((torch.cat(alone).float() - ours.float()).abs().max()),
        "norm": float(theirs.float().norm()),
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    cpu_conv.install()
    found: dict[str, Any] = {}
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{out.parent / 'store'}", 0, "gloo")
        initialize_model_parallel()
    for name in sys.argv[2:] or MODELS:
        for kept in (False, True):
            found[f"{name}, kept" if kept else name] = scenario(out.parent / f"{kept}", name, kept=kept)
    out.write_text(json.dumps(found))

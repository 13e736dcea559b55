# SPDX-License-Identifier: Apache-2.0
"""The shapes of a model, from its config: transformers builds it on the meta device, where tensors have no contents.

Names and shapes are then exact for every architecture that transformers knows, and only what each parameter is to the server
is decided here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

from vllm_fp8ext.errors import ConfigError

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_LATENT = frozenset({"q_a_proj", "kv_a_proj_with_mqa"})
"""Projections into the latents of multi-head latent attention."""
UP_PROJECTION = "kv_b_proj"
"""The projection from the cached latent. Requests decode with a copy of it in 16 bits."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SCALED = frozenset(
    {"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
"""Rotary embeddings with which a config's `max_position_embeddings` has been multiplied already."""


class Role(Enum):
    """How a parameter is served: in FP8 or 16 bits, and divided how among tensor-parallel ranks."""

    PROJECTION = "projection"
    """Quantized, divided among the ranks."""
    KV_PROJECTION = "kv_projection"
    """The same, but a rank never has less than one KV head."""
    LATENT_PROJECTION = "latent_projection"
    """Quantized, on every rank."""
    EMBEDDING = "embedding"
    """16 bits, divided."""
    KEPT = "kept"
    """16 bits, on every rank: norms, biases, routers."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    """`[rows, columns]` of a projection, `[experts, rows, columns]` of all experts of a layer."""
    role: Role

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Shapes of a model that memory depends on."""

    name: str
    parameters: tuple[Parameter, ...]
    """Each once: tied embeddings are one."""
    windows: tuple[int | None, ...]
    """Per attention layer, the tokens that it sees; `None`: all."""
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    width: int
    """Elements per token of the MLP's intermediate; of all chosen experts together."""
    experts_per_token: int
    """0 for dense models."""
    vocabulary: int
    max_context: int
    latent: int = 0
    """Elements per token and layer that multi-head latent attention caches, on every rank; 0: K and V are cached."""


def read_model(where: str) -> Model:
    """Read a model's config from a folder, a file, or the Hub; no weights are read.

    Raises:
        ConfigError: no config, an architecture that transformers does not know, or one whose memory this can't tell.
    """
    return shapes(_config(where), where)


def _config(where: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers import __version__ as version

    path = Path(where)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if path.is_dir() or where.startswith((".", "/", "~")) or where.endswith(".json"):
            raise ConfigError(f"there is no {file}")
        try:
            return AutoConfig.from_pretrained(where)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{where!r} is no folder here, and the Hub gave no config: {_line(error)}"
            ) from None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config.pop("model_type")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is not a model's config: {type(error).__name__}: {error}") from None
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"unknown architecture {kind!r}: transformers {version} has none")
    try:
        return AutoConfig.for_model(kind, **config)
    except Exception as error:  # each architecture checks in its own way
        raise ConfigError(f"{file}: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def shapes(config: Any, name: str) -> Model:
    """The model of a transformers configuration.

    Raises:
        ConfigError: transformers makes no causal language model of it, or this can't tell its memory.
    """
    try:
        _refuse(config)
        return _built(config, name)
    except Exception as error:  # whatever an architecture's own code says to such a config
        raise ConfigError(f"no plan for {name} ({config.model_type}): {_line(error)}") from None


def _built(config: Any, name: str) -> Model:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    heads = int(config.num_attention_heads)
    experts = int(getattr(config, "num_experts_per_tok", 0) or 0)
    hidden = int(config.hidden_size)
    latent = int(getattr(config, "kv_lora_rank", 0) or 0)
    width = int(getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden)
    shape = Model(
        name=name,
        parameters=tuple(_parameters(model)),
        windows=_windows(config),
        heads=heads,
        kv_heads=1 if latent else _kv_heads(config) or heads,
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        hidden=hidden,
        width=experts * int(getattr(config, "moe_intermediate_size", None) or width) if experts else width,
        experts_per_token=experts,
        vocabulary=int(config.vocab_size),
        max_context=_max_context(config),
        latent=latent + int(config.qk_rope_head_dim) if latent else 0,
    )
    rows = shape.kv_heads * shape.head_dim
    for parameter in shape.parameters:
        if parameter.role is Role.KV_PROJECTION and parameter.shape[0] != rows:
            raise ConfigError(
                f"{parameter.name} has {parameter.shape[0]} rows, where KV heads and head_dim say {rows}"
            )
    return shape


def _max_context(config: Any) -> int:
    """Tokens that vLLM lets a request have (`_get_and_verify_max_len`)."""
    rope = getattr(config, "rope_parameters", None) or {}
    layers = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    factors = [kind.get("factor") for kind in layers if kind.get("rope_type") not in _SCALED]
    factor = (factors[-1] if factors else None) or 1.0
    return int(config.max_position_embeddings * (1.0 if "gemma3" in config.model_type else factor))


def _refuse(config: Any) -> None:
    """Features with another kind of cache, or parts outside of this arithmetic."""
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [_FULL])
    reason = None
    if config.get_text_config() is not config:
        reason = "it has parts beside the language model"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "it has an encoder"
    elif getattr(config, "index_topk", None):
        reason = "it has sparse attention, whose indexer has a cache of its own"
    elif not getattr(config, "num_attention_heads", None):
        reason = "its config names no attention heads"
    elif others := kinds - {_FULL, _SLIDING}:
        reason = (
            f"it has layers that are neither full nor sliding-window attention: {', '.join(sorted(others))}"
        )
    elif getattr(config, "num_kv_shared_layers", 0):
        reason = "it has layers that share a KV cache"
    if reason:
        raise ConfigError(reason)


def _kv_heads(config: Any) -> int | None:
    """As vLLM reads it; `None`: as many as heads."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    default = _SLIDING if window else _FULL
    kinds = getattr(config, "layer_types", None) or [default] * int(config.num_hidden_layers)
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _parameters(model: Any) -> Iterator[Parameter]:
    from torch.nn import Embedding

    embeddings = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    modules = dict(model.named_modules())
    for name, tensor in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = path.rpartition(".")[2]
        if id(modules[path]) in embeddings and leaf == "weight":
            role = Role.EMBEDDING
        elif (
            tensor.ndim < 2
            or leaf.endswith("bias")
            or owner in _ROUTERS
            or isinstance(modules[path], Embedding)
        ):
            role = Role.KEPT
        elif owner in _LATENT:
            role = Role.LATENT_PROJECTION
        else:
            role = Role.KV_PROJECTION if owner in ("k_proj", "v_proj") else Role.PROJECTION
        yield Parameter(name=name, shape=tuple(tensor.shape), role=role)

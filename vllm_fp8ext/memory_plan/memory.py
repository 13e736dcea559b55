# SPDX-License-Identifier: Apache-2.0
"""Memory of a model on each rank, and the rest for the KV cache. Bytes everywhere."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import get_args

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.numerics.layout import BLOCK, blocks
from vllm_fp8ext.layers.unquantized_layers import unfit
from vllm_fp8ext.memory_plan.model import UP_PROJECTION, Model, Parameter, Role

SIXTEEN_BITS = 2
SCALE_BYTES = 4
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
QUANTIZED = (Role.PROJECTION, Role.KV_PROJECTION, Role.LATENT_PROJECTION)
ROW_PARALLEL = frozenset(
    {"o_proj", "down_proj", "dense", "out_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h"}
)
"""Projections whose columns tensor-parallel ranks share out; of the others, the rows."""
UTILIZATION = 0.92
"""Default of vLLM's --gpu-memory-utilization."""
FIXED_OVERHEAD = 1_500_000_000
"""CUDA graphs, workspaces of cuBLAS and of attention, loaded kernels. A constant, from measured block counts of one shape
(Qwen3-8B) on one GPU (H200), which leave 1.3 to 1.4 GB beside weights and activations if the largest step had 16,384
tokens, 1.8 GB if it had 8,192."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How the model is to be served."""

    context: int
    """Tokens of each request, its prompt and its answer together."""
    total: int | None = None
    """Memory of one GPU; `None`: not known, then `kv_bytes` is."""
    utilization: float = UTILIZATION
    """The share of `total` that vLLM may take."""
    kv_bytes: int | None = None
    """Size of each rank's KV cache where it is given (--kv-cache-memory-bytes)."""
    tp: int = 1
    block_size: int = 16
    """Tokens of one KV-cache block."""
    batched_tokens: int = 8192
    """Tokens of the largest step, with which vLLM measures activations."""
    seqs: int = 1024
    """Requests of the largest step."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to serve it. Bytes are of one rank."""

    weights: str
    """`bf16` or `fp8`."""
    staging: str | None
    """Settings of the plugin under which it is so; `None` without the plugin."""
    kv: str
    """`bf16` or `fp8`."""
    weight_bytes: int
    twin_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    """Memory of the KV cache; 0 where weights do not fit."""
    short_bytes: int
    """Bytes that lack for weights, shadow, activations and one whole context; 0: it fits."""
    blocks: int
    """The engine's `num_gpu_blocks`."""
    tokens: int
    """KV tokens of all blocks, were every layer to see all of them."""
    batch: int
    """Whole contexts that fit at once."""


def rows(model: Model, serving: Serving) -> list[Row]:
    """BF16; FP8 without and with a shadow; each with a KV cache of 16 and of 8 bits.

    Raises:
        ConfigError: the model can't be divided so, or takes no such context.
    """
    check(model, serving)
    single = " or ".join(
        name for name in get_args(Settings.model_fields["staging"].annotation) if name != "shadow"
    )
    variants = (("bf16", None), ("fp8", single), ("fp8", "shadow"))
    return [
        _row(model, serving, weights, staging, kv)
        for (weights, staging), kv in product(variants, ("bf16", "fp8"))
    ]


def check(model: Model, serving: Serving) -> None:
    """Raise `ConfigError` for a context or a number of ranks that is not possible.

    A context is too long, or the number does not divide the heads."""
    if serving.context > model.max_context:
        raise ConfigError(
            f"--context {serving.context}: {model.name} takes {model.max_context} tokens at most"
        )
    if model.heads % serving.tp or (model.kv_heads % serving.tp and serving.tp % model.kv_heads):
        raise ConfigError(
            f"--tp {serving.tp} does not divide {model.heads} heads and {model.kv_heads} KV heads of {model.name}"
        )


def _row(model: Model, serving: Serving, weights: str, staging: str | None, kv: str) -> Row:
    weight_bytes = weight_memory(model, serving.tp, fp8=weights == "fp8")
    shadow = weight_bytes if staging == "shadow" else 0
    if weights == "fp8":
        weight_bytes += absorbed_memory(model, serving.tp)
    page = page_bytes(model, serving, fp8=kv == "fp8")
    groups = layer_groups(model.windows)
    block = page * max(len(group) for group in groups)
    needed = sum(request_blocks(group[0], serving) for group in groups)
    used = weight_bytes + shadow + overhead(model, serving)
    one_request = (needed + 1) * block  # vLLM never hands out block 0
    if serving.kv_bytes is not None:
        free = serving.kv_bytes
        short = one_request - free
        if serving.total is not None:
            short = max(short, used + free - serving.total)
    elif serving.total is not None:
        left = int(serving.total * serving.utilization) - used
        free, short = max(0, left), one_request - left
    else:
        raise ConfigError("the memory of the GPU or of the KV cache must be known")
    blocks = free // block
    return Row(
        weights=weights,
        staging=staging,
        kv=kv,
        weight_bytes=weight_bytes,
        twin_bytes=shadow,
        kv_bytes_per_token=page * len(model.windows) // serving.block_size,
        kv_bytes=free,
        short_bytes=max(0, short),
        blocks=blocks,
        tokens=blocks // len(groups) * serving.block_size,
        batch=max(blocks - 1, 0) // needed,
    )


def weight_memory(model: Model, tp: int, *, fp8: bool) -> int:
    """Weights of one rank."""
    named = {parameter.name: parameter for parameter in model.parameters}
    return sum(_parameter_memory(parameter, named, model, tp, fp8=fp8) for parameter in model.parameters)


def absorbed_memory(model: Model, tp: int) -> int:
    """Return the bytes of up-projections that latent attention keeps in 16 bits beside FP8.

    They are of one rank. A shadow has none.
    """
    up = (parameter for parameter in model.parameters if parameter.name.endswith(f"{UP_PROJECTION}.weight"))
    return sum(parameter.size // tp * SIXTEEN_BITS for parameter in up)


def _parameter_memory(
    parameter: Parameter, named: Mapping[str, Parameter], model: Model, tp: int, *, fp8: bool
) -> int:
    parts = _ranks(parameter, model, tp)
    size = -(-parameter.size // parts)
    if not fp8 or parameter.role not in QUANTIZED:
        return size * SIXTEEN_BITS
    if len(parameter.shape) == 3:
        return _experts_memory(parameter, tp)
    if unfit(*_served_shape(parameter, named, model, tp), "bfloat16"):
        return size * SIXTEEN_BITS
    rows, columns = parameter.shape
    return size + -(-blocks(rows) * blocks(columns) // parts) * SCALE_BYTES


def _ranks(parameter: Parameter, model: Model, tp: int) -> int:
    """Among how many ranks a parameter is divided."""
    alone = {Role.KEPT: 1, Role.LATENT_PROJECTION: 1, Role.KV_PROJECTION: min(tp, model.kv_heads)}
    return alone.get(parameter.role, tp)


def _served_shape(
    parameter: Parameter, named: Mapping[str, Parameter], model: Model, tp: int
) -> tuple[int, int]:
    """Rows and columns of the matrix of one rank in which a projection is served: q, k and v are one, gate and up another."""
    rows, columns = parameter.shape
    path, _, name = parameter.name.removesuffix(".weight").rpartition(".")
    if name in ROW_PARALLEL:
        return rows, columns // tp
    names = next((group for group in FUSED if name in group), (name,))
    parts = [named.get(f"{path}.{part}.weight", parameter) for part in names]
    return sum(part.shape[0] // _ranks(part, model, tp) for part in parts), columns


def _experts_memory(parameter: Parameter, tp: int) -> int:
    """Codes and scales of all experts of a layer: each rank's part of gate, of up and of down is padded to whole blocks."""
    experts, rows, columns = parameter.shape
    if parameter.name.endswith("gate_up_proj"):
        rows = 2 * blocks(-(-rows // 2 // tp)) * BLOCK
    else:
        columns = blocks(-(-columns // tp)) * BLOCK
    return experts * (rows * columns + blocks(rows) * blocks(columns) * SCALE_BYTES)


def page_bytes(model: Model, serving: Serving, *, fp8: bool) -> int:
    """K and V, or the latent, of one layer and one block, on one rank."""
    if model.latent:
        return model.latent * serving.block_size * (1 if fp8 else SIXTEEN_BITS)
    heads = max(1, model.kv_heads // serving.tp)
    return 2 * heads * model.head_dim * serving.block_size * (1 if fp8 else SIXTEEN_BITS)


def layer_groups(windows: tuple[int | None, ...]) -> list[tuple[int | None, ...]]:
    """Layers by the block table that they share: vLLM gives each group of equal layers blocks of its own, all of one size
    (`_get_kv_cache_groups_uniform_page_size`)."""
    counts = Counter(windows)
    size = min(counts.values())
    if max(counts.values()) < 1.5 * size:
        size = max(counts.values())
    return [
        (window,) * min(size, count - start)
        for window, count in counts.items()
        for start in range(0, count, size)
    ]


def request_blocks(window: int | None, serving: Serving) -> int:
    """Count one group's KV blocks for a whole context, once its prompt is computed."""
    whole = -(-serving.context // serving.block_size)
    if window is None or window >= serving.context:
        return whole
    return min(whole, -(-window // serving.block_size) + 1)


def overhead(model: Model, serving: Serving) -> int:
    """Estimate what vLLM measures before it sizes the KV cache: the peak of one largest step, and what is fixed.

    The peak is the larger of an MLP (its input, the residual, gate, up and their product; with experts, their outputs as
    well) in 16 bits, and of the logits of every request in 16 and 32 bits beside the hidden states.
    """
    states = 2 * model.hidden + model.experts_per_token * model.hidden
    forward = serving.batched_tokens * SIXTEEN_BITS * (states + 3 * model.width // serving.tp)
    logits = min(serving.seqs, serving.batched_tokens) * model.vocabulary * (SIXTEEN_BITS + 4)
    sampling = logits + serving.batched_tokens * SIXTEEN_BITS * model.hidden
    return max(forward, sampling) + FIXED_OVERHEAD

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of real shapes with generated weights: Gaussian, with outlier channels, and norms around one."""

import json
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.bench.model_shapes import ADDS_ONE, ARCHITECTURE, MODEL_SHAPES, config_of, tensors_of
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.serve.safetensors_body import SafetensorsBody
from vllm_fp8ext.serve.tensors import tensor_parts

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512},
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    }
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen3-1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    }
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    }
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    "Qwen3-32B": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    }
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    "tiny-experts": {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    | {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "moe_intermediate_size": 256}
    | {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": False},
    "Qwen3-30B-A3B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    }
    | {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False},
    **MODEL_SHAPES,
}
"""Sizes by the name of a model: of Qwen3, or of the architecture that they name."""
POSITIONS = 40960
_SHARD_BYTES = 2 << 30
_WRITERS = 8
"""Shards that are written at a time."""
_OUTLIERS = 0.01
_OUTLIER_FACTOR = 8.0


@contextmanager
def checkpoint(existing: Path | None, shape: str) -> Iterator[Path]:
    """The `existing` folder, or a temporary one; where there is no checkpoint in it, one of `shape` is written.

    Raises:
        ConfigError: no GPU to generate weights on.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = existing or Path(temporary)
        if not (folder / "config.json").exists():
            if not torch.cuda.is_available():
                raise ConfigError("generated weights: expected a CUDA GPU, found none")
            write_checkpoint(folder, shape, 0, "cuda")
        yield folder


def two_checkpoints(
    existing: list[Path] | None, shape: str, folder: Path, device: str | None = None
) -> list[Path]:
    """Return the given checkpoints, or generate two of a shape that differ.

    `device` generates them (by default a GPU, if there is one)."""
    if existing:
        return existing
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    checkpoints = [folder / "a", folder / "b"]
    for seed, checkpoint in enumerate(checkpoints):
        size = write_checkpoint(checkpoint, shape, seed, device)
        print(f"{checkpoint.name}: {size / 1e9:.1f} GB generated", flush=True)
    return checkpoints


def allowed_dirs(checkpoints: Iterable[Path]) -> list[str]:
    """Return the folders that a server must allow to read these from its disk."""
    return sorted({str(checkpoint.resolve().parent) for checkpoint in checkpoints})


def write_checkpoint(folder: Path, shape: str, seed: int, device: str) -> int:
    """Write a BF16 checkpoint of a named shape; returns its bytes. Its configuration comes last: where there is one, the
    weights are whole."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(shape)
    total = _write_weights(folder, config, torch.Generator(device).manual_seed(seed), device)
    config.save_pretrained(folder)
    if device != "cpu":
        torch.cuda.empty_cache()  # for who serves it
    return total


def _write_weights(folder: Path, config: Any, generator: torch.Generator, device: str) -> int:
    """Some shards are written beside the next one's making; the index, which transformers reads, comes last."""
    total = 0
    files: dict[str, str] = {}
    with ThreadPoolExecutor(_WRITERS) as writers:
        waiting: deque[Future[None]] = deque()
        for index, shard in enumerate(_shards(config, generator, device)):
            total += sum(tensor.nbytes for tensor in shard.values())
            file = f"model-{index:05d}.safetensors"
            files |= dict.fromkeys(shard, file)
            if device != "cpu":
                torch.cuda.synchronize()
            waiting.append(writers.submit(_write, shard, folder / file))
            if len(waiting) > _WRITERS:
                waiting.popleft().result()
        for shard_written in waiting:
            shard_written.result()
    index_file = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return total


def _config(shape: str) -> Any:
    sizes = SHAPES[shape]
    if ARCHITECTURE not in sizes:
        sizes = {ARCHITECTURE: f"{'Qwen3Moe' if 'num_experts' in sizes else 'Qwen3'}ForCausalLM", **sizes}
    config = config_of(sizes, POSITIONS)
    config.dtype = "bfloat16"
    return config


def _shards(config: Any, generator: torch.Generator, device: str) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    made = _qwen3_tensors if config.model_type in ("qwen3", "qwen3_moe") else _tensors
    for name, tensor in made(config, generator, device):
        shard[name] = tensor
        size += tensor.nbytes
        if size >= _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _write(shard: dict[str, Tensor], file: Path) -> None:
    """As safetensors' `save_file` would, but straight into the file's pages."""
    body = SafetensorsBody(tuple(tensor_parts(shard.items(), ["bfloat16"])))
    header, at = body.header, len(body.header)
    with file.open("wb") as empty:  # pages that find no room would kill the process
        os.posix_fallocate(empty.fileno(), 0, at + body.size)
    pages = torch.from_file(str(file), shared=True, size=at + body.size, dtype=torch.uint8)
    pages[:at] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for tensor in shard.values():
        pages[at : at + tensor.nbytes].view(torch.bfloat16).view(tensor.shape).copy_(tensor)
        at += tensor.nbytes


def _tensors(config: Any, generator: torch.Generator, device: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of any architecture, drawn as those of Qwen3 are."""

    def normal(sizes: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device) * scale

    for name, sizes, kind in tensors_of(config):
        if kind == "matrix":
            values = normal(sizes, sizes[-1] ** -0.5)
            outliers = torch.rand(sizes[-1], generator=generator, device=device) < _OUTLIERS
            values = torch.where(outliers, values * _OUTLIER_FACTOR, values)
        elif kind == "norm":
            adds_one = config.model_type in ADDS_ONE and "linear_attn" not in name
            values = normal(sizes, 0.1) + (0 if adds_one else 1)
        elif kind == "decay":  # decays of 1 to 16
            values = (1 + 15 * torch.rand(*sizes, generator=generator, device=device)).log()
        else:
            values = normal(sizes, 0.5 if kind == "conv" else 0.02)
        yield name, values.bfloat16()


def _qwen3_tensors(config: Any, generator: torch.Generator, device: str) -> Iterator[tuple[str, Tensor]]:
    hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads

    def norm(size: int) -> Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator, device=device)).bfloat16()

    def matrix(rows: int, columns: int, *experts: int) -> Tensor:
        values = torch.randn(*experts, rows, columns, generator=generator, device=device) * columns**-0.5
        outliers = torch.rand(columns, generator=generator, device=device) < _OUTLIERS
        return torch.where(outliers, values * _OUTLIER_FACTOR, values).bfloat16()

    yield "model.embed_tokens.weight", matrix(config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", norm(hidden)
        yield prefix + "post_attention_layernorm.weight", norm(hidden)
        yield prefix + "self_attn.q_norm.weight", norm(config.head_dim)
        yield prefix + "self_attn.k_norm.weight", norm(config.head_dim)
        yield prefix + "self_attn.q_proj.weight", matrix(heads * config.head_dim, hidden)
        yield prefix + "self_attn.k_proj.weight", matrix(kv * config.head_dim, hidden)
        yield prefix + "self_attn.v_proj.weight", matrix(kv * config.head_dim, hidden)
        yield prefix + "self_attn.o_proj.weight", matrix(hidden, heads * config.head_dim)
        count = getattr(config, "num_experts", None)
        width = config.moe_intermediate_size if count else config.intermediate_size
        if count:
            yield prefix + "mlp.gate.weight", matrix(count, hidden)
        for name, sizes in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            if not count:
                yield f"{prefix}mlp.{name}_proj.weight", matrix(*sizes)
                continue
            for expert, weight in enumerate(matrix(*sizes, count)):
                yield f"{prefix}mlp.experts.{expert}.{name}_proj.weight", weight
    yield "model.norm.weight", norm(hidden)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", matrix(config.vocab_size, hidden)

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of real shapes with generated weights: Gaussian, with outlier channels, and norms around one."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from vllm_fp8ext.errors import ConfigError

SHAPES = {
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
}
_SHARD_BYTES = 4 << 30
_OUTLIERS = 0.01
_OUTLIER_FACTOR = 8.0


@contextmanager
def checkpoint(given: Path | None, shape: str) -> Iterator[Path]:
    """The folder that was `given`, or a temporary one; where there is no checkpoint in it, one of `shape` is written.

    Raises:
        ConfigError: no GPU to generate weights on.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = given or Path(temporary)
        if not (folder / "config.json").exists():
            if not torch.cuda.is_available():
                raise ConfigError("generated weights: expected a CUDA GPU, found none")
            write_checkpoint(folder, shape, 0, "cuda")
        yield folder


def two_checkpoints(
    given: list[Path] | None, shape: str, folder: Path, device: str | None = None
) -> list[Path]:
    """The given ones, or two of a shape that differ, written to a folder on `device` (by default a GPU, if there is one)."""
    if given:
        return given
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = [folder / "a", folder / "b"]
    for seed, checkpoint in enumerate(found):
        size = write_checkpoint(checkpoint, shape, seed, device)
        print(f"{checkpoint.name}: {size / 1e9:.1f} GB generated", flush=True)
    return found


def write_checkpoint(folder: Path, shape: str, seed: int, device: str) -> int:
    """Write a BF16 checkpoint of a named shape; returns its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=40960, architectures=["Qwen3ForCausalLM"])
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(seed)
    shard: dict[str, Tensor] = {}
    total = size = index = 0
    for name, tensor in _tensors(config, generator, device):
        shard[name] = tensor.cpu()
        size += tensor.nbytes
        total += tensor.nbytes
        if size >= _SHARD_BYTES:
            save_file(shard, folder / f"model-{index:05d}.safetensors")
            shard, size, index = {}, 0, index + 1
    if shard:
        save_file(shard, folder / f"model-{index:05d}.safetensors")
    return total


def _tensors(config: Qwen3Config, generator: torch.Generator, device: str) -> Iterator[tuple[str, Tensor]]:
    hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads

    def norm(size: int) -> Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator, device=device)).bfloat16()

    def matrix(rows: int, columns: int) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5
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
        yield prefix + "mlp.gate_proj.weight", matrix(config.intermediate_size, hidden)
        yield prefix + "mlp.up_proj.weight", matrix(config.intermediate_size, hidden)
        yield prefix + "mlp.down_proj.weight", matrix(hidden, config.intermediate_size)
    yield "model.norm.weight", norm(hidden)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", matrix(config.vocab_size, hidden)

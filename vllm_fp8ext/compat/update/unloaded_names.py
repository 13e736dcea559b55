# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors of a model that starts with `--load-format dummy`: names, shapes and dtypes that updates bring.

They are those of the safetensors files in the model's folder, of which headers alone are read. Without files they are
those of transformers' model, made without memory.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.layers.lm_head import is_tied
from vllm_fp8ext.update.contract.checkpoint_files import checkpoint_files
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.safetensors_header import file_tensors

FEATURE: str = "core"
WHY: str = (
    "Know what updates bring to a model that was loaded without weights: vLLM's dummy loader reads no name."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "know whether a model has an output layer of its own": (
        "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM tells the names and shapes of a model's checkpoint without loading it"

logger = logging.getLogger("vllm.fp8ext")

DUMMY = "dummy"
"""The load format."""


def expected_specs(model_config: Any, model: nn.Module) -> dict[str, TensorSpec]:
    """Return the tensors of a model's checkpoint, by name.

    Raises:
        ConfigError: neither its folder nor transformers tells them.
    """
    specs, found_in = _of_folder(Path(model_config.model)), model_config.model
    if not specs:
        specs, found_in = _of_transformers(model_config), "transformers' model"
    has_head = any(isinstance(module, ParallelLMHead) for module in model.modules())
    if not has_head and (is_tied(model_config) or get_pp_group().is_last_rank):
        specs = {name: spec for name, spec in specs.items() if not name.endswith("lm_head.weight")}
    logger.info("blockfp8: updates bring %d tensors, by %s", len(specs), found_in)
    return specs


def _of_folder(folder: Path) -> dict[str, TensorSpec]:
    try:
        files = checkpoint_files(folder)
    except UpdateError:
        return {}
    return {stored.spec.name: stored.spec for file in files for stored in file_tensors(file)}


def _of_transformers(model_config: Any) -> dict[str, TensorSpec]:
    import transformers

    config = model_config.hf_config
    try:
        kind = getattr(transformers, config.architectures[0])
        with torch.device("meta"):
            tensors = kind(config).state_dict()
        tied = getattr(kind, "_tied_weights_keys", None) or () if config.tie_word_embeddings else ()
    except Exception as error:
        raise ConfigError(
            f"--load-format dummy: expected *.safetensors in {model_config.model}, or a model that transformers knows "
            f"({config.architectures}: {error}), to know what updates bring. The setting staging none serves dummy weights "
            "without updates"
        ) from error
    dtype = str(model_config.dtype).removeprefix("torch.")
    return {
        name: TensorSpec(name, tuple(tensor.shape), dtype if tensor.is_floating_point() else _name(tensor))
        for name, tensor in tensors.items()
        if name not in tied
    }


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

# SPDX-License-Identifier: Apache-2.0
"""Refuses a checkpoint that has a tensor twice.

vLLM serves the copy that its loader happens to read last, whatever the index says.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_fp8ext.compat.wrapping import wrapped
from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.update.contract.checkpoint_files import checkpoint_files
from vllm_fp8ext.update.contract.safetensors_header import file_tensors

FEATURE: str = "core"
WHY: str = "Refuse a checkpoint that has a tensor twice: vLLM serves the copy that it reads last."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights(model_config, model)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM refuses such a checkpoint, or reads each tensor from the file that the index names"

_TOLD = 20


@contextmanager
def no_tensor_twice() -> Iterator[None]:
    """Watch what the default loader reads meanwhile.

    Raises:
        ConfigError: on leaving, also by an error: the loader read tensors of one name more than once for one model. A layer
            that is quantized once it is complete takes no second copy, and says nothing of use.
    """
    repeated: dict[str, set[str]] = defaultdict(set)

    def wrap_get_all_weights(original: Any) -> Any:
        def get_all_weights(self: Any, of: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
            seen: set[str] = set()
            for name, tensor in original(self, of, model):
                if name in seen:
                    repeated[of.model].add(name)
                seen.add(name)
                yield name, tensor

        return get_all_weights

    try:
        with wrapped(DefaultModelLoader, "get_all_weights", wrap_get_all_weights):
            yield
    except Exception as error:
        for checkpoint, names in repeated.items():
            raise _refusal(checkpoint, names) from error
        raise
    for checkpoint, names in repeated.items():
        raise _refusal(checkpoint, names)


def _refusal(checkpoint: str, seen: set[str]) -> ConfigError:
    holders = _holders(checkpoint)
    names = sorted(seen | {name for name, files in holders.items() if len(files) > 1})
    lines = [f"{name} ({', '.join(holders[name])})" if name in holders else name for name in names[:_TOLD]]
    if len(names) > _TOLD:
        lines.append(f"and {len(names) - _TOLD} more")
    return ConfigError(
        f"{checkpoint}: expected each tensor once, found {len(names)} in more than one file. Remove the copies that the "
        "index does not name:\n  " + "\n  ".join(lines)
    )


def _holders(checkpoint: str) -> dict[str, list[str]]:
    """Names of a local checkpoint's files by the tensors that they have."""
    holders: dict[str, list[str]] = defaultdict(list)
    with suppress(UpdateError):
        for file in checkpoint_files(Path(checkpoint)):
            for stored in file_tensors(file):
                holders[stored.spec.name].append(file.name)
    return dict(holders)

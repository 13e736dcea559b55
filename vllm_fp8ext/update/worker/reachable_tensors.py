# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a module tree by path, and which of them share memory."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """List parameters by path, a shared one under each of its paths."""
    return dict(model.named_parameters(remove_duplicate=False))


def loadable_tensors(model: nn.Module, others: Collection[str]) -> dict[str, Tensor]:
    """List what a loader may write by path: parameters first, then buffers and tensors that are plain attributes of modules.
    Those named as `others` are left out."""
    tensors = parameters_of(model)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in {**module._buffers, **vars(module)}.items():
            if isinstance(value, Tensor) and value.numel() and name not in others:
                tensors.setdefault(f"{prefix}.{name}".lstrip("."), value)
    return tensors


def tensor_at(model: nn.Module, path: str) -> Tensor:
    """Return what `loadable_tensors` lists under a path."""
    prefix, _, name = path.rpartition(".")
    tensor = getattr(model.get_submodule(prefix), name)
    assert isinstance(tensor, Tensor)
    return tensor


def reachable_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every non-empty tensor of a module tree: parameters, buffers, attributes, and attributes of plain objects."""
    for path, module in model.named_modules(remove_duplicate=False):
        named = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in named.items():
            if not name.startswith(("_parameters", "_buffers", "_modules")):
                for suffix, tensor in _tensors_in(value, depth=2):
                    yield f"{path}.{name}{suffix}".lstrip("."), tensor


def _tensors_in(value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.numel():
            yield "", value
    elif depth == 0 or isinstance(value, nn.Module | type):
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from ((f"[{key}]{rest}", tensor) for rest, tensor in _tensors_in(item, depth - 1))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from ((f"[{index}]{rest}", tensor) for rest, tensor in _tensors_in(item, depth - 1))
    elif type(value).__module__.startswith("vllm") and hasattr(value, "__dict__"):
        for key, item in vars(value).items():
            yield from ((f".{key}{rest}", tensor) for rest, tensor in _tensors_in(item, depth - 1))


def lies_in(part: Tensor, whole: Tensor) -> bool:
    """Tell whether a tensor lies in the bytes of a contiguous one."""
    first, start = (tensor.storage_offset() * tensor.element_size() for tensor in (part, whole))
    reach = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) + 1
    return start <= first and first + reach * part.element_size() <= start + whole.nbytes


def identity_of(tensor: Tensor) -> int:
    """Tell the storage of a tensor from others, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def storage_of(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor."""
    return tensor.untyped_storage().data_ptr()

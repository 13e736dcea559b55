# SPDX-License-Identifier: Apache-2.0
"""Saves what the backward pass needs in FP8: COAT's activations (arXiv 2410.19313, section 5).

Mixed granularity, E4M3:

- Inputs of linear layers have one scale per tensor, `amax / 448`. Group scaling finds it in two steps: the amax of each group
  of 128 values, then the largest of these, which is the same number.
- What everything else saves (norms, activation functions, products) has groups of 1×16 along the last dimension, with a scale
  of `amax / 448` each.

A value is `code × scale`, in the dtype that was saved. A tensor that several linear layers take one after another, such as
the input of q, k and v, is kept once. The forward pass is that of the model: only gradients see the rounding.
"""

from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, FP8_MAX, scale_of
from vllm_fp8ext.trainer.linear import BlockFp8Linear
from vllm_fp8ext.trainer.tensor_linear import TensorFp8Linear

Granularity = Literal["tensor", "group"]
GROUP = 16
"""Values with one scale in what non-linear layers save."""
AMAX_GROUP = 128
"""Values of a group whose amax is found first, for a scale per tensor."""
FEWEST = 1024
"""Elements below which a tensor is saved as it is."""
SAVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that are saved in FP8."""


class PackedActivation(NamedTuple):
    """A saved tensor. `codes`: E4M3 of its shape, `scales`: fp32 `[]`, or one for each 16 of the last dimension."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


class _Scope(NamedTuple):
    """The module whose forward pass runs: what it saves is quantized so, or not."""

    granularity: Granularity | None
    weight_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of a linear layer's weight, of which autocast and FSDP make copies."""
    given: int | None = None
    """Address of its input."""


_Key: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]


@torch.no_grad()
def pack(values: Tensor, granularity: Granularity) -> PackedActivation:
    """Quantize a tensor of any shape with at least one dimension. NaN stays NaN, infinity becomes NaN."""
    if granularity == "tensor":
        flat = values.reshape(-1).abs()
        whole = flat[: flat.numel() // AMAX_GROUP * AMAX_GROUP].view(-1, AMAX_GROUP)
        amax = torch.cat([whole.amax(1), flat[whole.numel() :], flat.new_zeros(1)]).amax().float()
        scale = scale_of(amax, "fp32")
        codes = (values.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
        return PackedActivation(codes, scale, values.dtype)
    columns = values.shape[-1]
    padded = nn.functional.pad(values.float(), (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    scales = scale_of(padded.abs().amax(-1), "fp32")
    codes = (padded / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE).flatten(-2)
    return PackedActivation(codes[..., :columns].contiguous(), scales, values.dtype)


def unpack(packed: PackedActivation) -> Tensor:
    """Return the values, in the dtype that was saved."""
    values = packed.codes.float()
    if not packed.scales.dim():
        return (values * packed.scales).to(packed.dtype)
    scales = packed.scales.repeat_interleave(GROUP, -1)[..., : values.shape[-1]]
    return (values * scales).to(packed.dtype)


class Fp8Activations:
    """Context in which a model's forward pass saves activations in FP8. The backward pass may be outside of it.

    ```python
    with Fp8Activations(model):
        logits = model(tokens)
    loss(logits).backward()
    ```

    Saved as they are: parameters and buffers, tensors of integers or FP8, those of fewer than 1,024 elements, and what
    modules named in `keep` and FP8 layers save. Not for CUDA graphs or `torch.compile`, which read no hooks.

    Raises:
        ValueError: A name in `keep` that the model does not have.
        RuntimeError: Entered twice.
    """

    def __init__(self, model: nn.Module, *, keep: tuple[str, ...] = ("lm_head",)) -> None:
        """Prepare. `keep`: names of modules, `lm_head` alone by default, which a model may lack."""
        named = dict(model.named_modules())
        missing = [name for name in keep if name not in named and name != "lm_head"]
        if missing:
            raise ValueError(f"keep: expected names of modules, found {', '.join(missing)}")
        self._model = model
        self._kept = {named[name] for name in keep if name in named}
        self._scopes: list[_Scope] = [_Scope("group")]
        self._own: set[int] = set()
        self._last: dict[Granularity, tuple[_Key, Tensor, PackedActivation]] = {}
        self._handles: list[Any] = []
        self._hooks: Any = None

    def __enter__(self) -> Self:
        if self._hooks is not None:
            raise RuntimeError("Fp8Activations: expected to be entered once, found it entered already")
        self._own = {
            each.untyped_storage().data_ptr() for each in (*self._model.parameters(), *self._model.buffers())
        }
        for module in self._model.modules():
            if module in self._kept or isinstance(module, nn.Linear):
                self._handles.append(module.register_forward_pre_hook(self._begin, prepend=True))
                self._handles.append(module.register_forward_hook(self._end, always_call=True))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)
        for handle in self._handles:
            handle.remove()
        self._handles, self._hooks, self._last = [], None, {}
        self._scopes = [_Scope("group")]

    def _begin(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        own = isinstance(module, BlockFp8Linear | TensorFp8Linear)
        # what is in a kept module is kept, too
        if module in self._kept or own or self._scopes[-1].granularity is None:
            self._scopes.append(_Scope(None))
        elif isinstance(module, nn.Linear):
            shape = tuple(module.weight.shape)
            given = arguments[0].untyped_storage().data_ptr() if arguments else None
            self._scopes.append(_Scope("tensor", (shape, shape[::-1]), given))

    def _end(self, *_: object) -> None:
        self._scopes.pop()

    def _pack(self, values: Tensor) -> Tensor | PackedActivation:
        granularity, weight_shapes, given = self._scopes[-1]
        if granularity is None or values.dtype not in SAVED_DTYPES or values.numel() < FEWEST:
            return values
        storage = values.untyped_storage().data_ptr()
        if storage in self._own or (tuple(values.shape) in weight_shapes and storage != given):
            return values
        key: _Key = values.data_ptr(), values._version, tuple(values.shape), values.stride()
        last = self._last.get(granularity)
        if last is None or last[0] != key or last[1].dtype != values.dtype:
            # the last tensor is held, so that no other one can be at its address
            last = self._last[granularity] = key, values.detach(), pack(values, granularity)
        return last[2]


def _unpack(saved: Tensor | PackedActivation) -> Tensor:
    return unpack(saved) if isinstance(saved, PackedActivation) else saved

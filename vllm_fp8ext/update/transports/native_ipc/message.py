# SPDX-License-Identifier: Apache-2.0
"""The message that tells ranks of tensors that a trainer's torch has exported. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, ClassVar, Self

from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.native_handles import ExportedTensor
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.transport import Source

_FIELDS = tuple(field.name for field in fields(ExportedTensor))


@dataclass(frozen=True, kw_only=True)
class NativeIpcSource(Source):
    """Tensors that each of some GPUs has. Their starts count through all of them, one after the other.

    `gpus`: handles in the order of the tensors, by the UUID of the GPU. `packed`: all lie in one buffer, which the trainer
    exports once for several calls. `seconds`: longest wait for what the trainer's GPU still writes.
    """

    gpus: Mapping[str, Sequence[ExportedTensor]]
    packed: bool

    transport: ClassVar[str] = "native_ipc"

    def as_dict(self) -> dict[str, Any]:
        """Return the source as JSON values, with the name of its transport."""
        gpus = {
            gpu: [[getattr(handle, name) for name in _FIELDS] for handle in handles]
            for gpu, handles in self.gpus.items()
        }
        return {"transport": self.transport, "gpus": gpus, "packed": self.packed}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the source of these fields, of which JSON has made handles lists."""
        gpus = {
            gpu: [ExportedTensor(**dict(zip(_FIELDS, values, strict=True))) for values in handles]
            for gpu, handles in fields["gpus"].items()
        }
        return cls(gpus=gpus, packed=fields["packed"])


def stored(specs: Sequence[TensorSpec], sizes: Sequence[int]) -> list[StoredTensor]:
    """Return tensors of these bytes with the starts that a source counts."""
    starts = accumulate(sizes, initial=0)
    return [StoredTensor(spec, start, size) for spec, start, size in zip(specs, starts, sizes, strict=False)]

# SPDX-License-Identifier: Apache-2.0
"""Arguments by which the engine stages a chunk."""

from collections.abc import Sequence
from typing import Any

from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.transport import Source


def stage_arguments(
    id: str, chunk: str, source: Source, tensors: Sequence[StoredTensor], size: int
) -> dict[str, Any]:
    """Arguments of `UpdateEngine.stage`, as plain data; `size` in bytes."""
    listed = [[t.spec.name, list(t.spec.shape), t.spec.dtype, t.start, t.size] for t in tensors]
    return {"id": id, "chunk": chunk, "source": source.as_dict(), "tensors": listed, "size": size}

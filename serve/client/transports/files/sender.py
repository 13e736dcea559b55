# SPDX-License-Identifier: Apache-2.0
"""The sender of a path on the server's own disk."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Self

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.everywhere import Everywhere
from vllm_fp8ext.serve.client.flow import Endpoint, Flow
from vllm_fp8ext.serve.client.source import Manifests, Pushable

if TYPE_CHECKING:
    from vllm_fp8ext.serve.client.options import PushOptions


@dataclass(frozen=True)
class FilesSender:
    """Names a checkpoint, which every server reads by itself."""

    path: str

    @classmethod
    def prepare(cls, weights: Pushable, options: "PushOptions", manifests: Manifests) -> Flow[Self]:
        """Take the path.

        Raises:
            ValueError: tensors, or `fp8`: nothing is quantized here.
        """
        yield from ()
        if not isinstance(weights, str | PathLike):
            raise ValueError(
                f"transport: files: expected a path on the server, found {type(weights).__name__}"
            )
        if options.fp8:
            raise ValueError("transport: files: expected fp8=False, since the server reads the files")
        return cls(os.fspath(weights))

    def send(
        self,
        updates: Mapping[Endpoint, schema.Update],
        everywhere: Everywhere,
        committed: Sequence[schema.Update] = (),
    ) -> Flow[None]:
        """Have every server read the checkpoint."""
        if updates:
            yield from everywhere(
                list(updates), lambda endpoint: calls.files(endpoint, updates[endpoint].id, self.path)
            )

# SPDX-License-Identifier: Apache-2.0
"""The message that tells ranks of a body that has come over HTTP."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_fp8ext.update.transports.transport import Source


@dataclass(frozen=True)
class UploadSource(Source):
    """A body at byte `offset` of the shared buffer `path`, in which uploads wait."""

    path: str
    offset: int = 0

    transport: ClassVar[str] = "http"

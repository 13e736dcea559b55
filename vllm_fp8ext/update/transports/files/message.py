# SPDX-License-Identifier: Apache-2.0
"""The message that tells ranks of a file on the server's disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm_fp8ext.update.contract.regular_file import Stamp
from vllm_fp8ext.update.transports.transport import Source


@dataclass(frozen=True)
class FileSource(Source):
    """One version of a file. Its `path` has no links, and is opened from the descriptor of `folder`, which holds it."""

    path: str
    stamp: Stamp
    folder: str = "/"

    transport: ClassVar[str] = "files"

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the source of these fields, of which JSON has made the stamp a list."""
        return cls(fields["path"], Stamp(*fields["stamp"]), fields["folder"])

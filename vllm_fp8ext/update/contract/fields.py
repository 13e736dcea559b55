# SPDX-License-Identifier: Apache-2.0
"""Types of the fields of request bodies."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_TEXT = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$"
"""No control characters."""

Name = Annotated[str, Field(min_length=1, max_length=512, pattern=_TEXT)]
"""Name of a tensor or a layer: no model has longer ones."""
Version = Annotated[str, Field(min_length=1, max_length=256, pattern=_TEXT)]
Size = Annotated[int, Field(ge=0, le=2**53)]
"""Number of bytes or elements: JSON's numbers are exact up to this one."""
Path = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
ChunkNumber = Annotated[int, Field(ge=0, le=65_535)]

WAIT_SECONDS = 60.0
"""Longest time that a commit waits for running requests, unless its update says another."""


class Body(BaseModel):
    """A request body: unknown fields are errors, and nothing is taken for what it is not (`true` for 1, say)."""

    model_config = ConfigDict(extra="forbid", strict=True)

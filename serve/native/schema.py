# SPDX-License-Identifier: Apache-2.0
"""Bodies of vLLM's own weight routes. Imports neither vLLM nor torch. Unknown fields are ignored, as vLLM ignores them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class NativeBody(BaseModel):
    """A request body; nothing is taken for what it is not."""

    model_config = ConfigDict(strict=True)


class InitBody(NativeBody):
    """Body of `/init_weight_transfer_engine`."""

    init_info: dict[str, Any]


class StartBody(NativeBody):
    """Body of `/start_weight_update`, which is empty in vLLM since 0.28."""

    is_checkpoint_format: bool = True


class UpdateBody(NativeBody):
    """Body of `/update_weights`: vLLM's, or prime-rl's with a folder."""

    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    weight_dir: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")] | None = None


class ArealBody(NativeBody):
    """Body of `/areal_update_weights`."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class FinishBody(NativeBody):
    """Body of `/finish_weight_update`."""

    weight_version: str | None = None


class VersionBody(NativeBody):
    """Body of `/update_weight_version`."""

    new_version: str


class RpcBody(NativeBody):  # type: ignore[no-redef]  # pydantic's plugin names its own parameter kwargs
    """Body of `/collective_rpc`: a public method, and what it takes."""

    method: Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class AbortBody(NativeBody):
    """Body of `/abort_requests`: all requests without ids."""

    request_ids: list[str] | None = None

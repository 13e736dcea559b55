# SPDX-License-Identifier: Apache-2.0
"""A push by the transport `files`: the server reads a checkpoint of its own disk."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import AsyncClient, Pushable

from .server import DiskServer

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path


def pushed(server: DiskServer, weights: Pushable, **options: Any) -> schema.Update:
    async def push() -> schema.Update:
        transport = httpx.ASGITransport(server.app)
        async with AsyncClient("http://here", "key", transport=transport, retries=0) as client:
            return await client.push(weights, transport="files", **options)

    return asyncio.run(push())


@pytest.mark.parametrize("form", [str, Path])
def test_a_folder_is_read_and_committed(folder: Path, form: type) -> None:
    server = DiskServer(folder)
    update = pushed(server, form(folder), version="v1")
    assert (update.state, update.version, len(update.chunks)) == ("committed", "v1", 1)
    assert server.ranks.served == {name: tensor.tolist() for name, tensor in WEIGHTS.items()}


def test_a_folder_that_is_not_allowed_leaves_no_update_open(folder: Path, tmp_path: Path) -> None:
    server = DiskServer(tmp_path / "elsewhere")
    with pytest.raises(UpdateError) as caught:
        pushed(server, folder)
    assert caught.value.status == 403
    assert server.ranks.served == {}
    assert server.post("/updates").status_code == 201


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (WEIGHTS, {}, "expected a path on the server, found dict"),
        ("/models", {"fp8": True}, "expected fp8=False, since the server reads the files"),
    ],
)
def test_what_no_server_can_read(
    tmp_path: Path, weights: Pushable, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pushed(DiskServer(tmp_path), weights, **options)

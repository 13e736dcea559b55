# SPDX-License-Identifier: Apache-2.0
"""Servers, and a caller that is blocking in one run of each test and on an event loop in the other."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_fp8ext.environment import ADMIN_KEY, URL
from vllm_fp8ext.serve.client import AsyncClient, AsyncReplicas, Client, Replicas, repeat
from vllm_fp8ext.serve.client.servers import Servers

from .server import KEY, Server


@dataclass(frozen=True)
class Caller:
    """Calls a method of a client of one server, or of several."""

    kind: str

    def __call__(
        self,
        target: str | Sequence[str] | Servers | None,
        method: str,
        *arguments: Any,
        key: str | None = KEY,
        timeout: float = 20.0,
        retries: int = 5,
        **named: Any,
    ) -> Any:
        one = target is None or isinstance(target, str)  # others name several
        options: dict[str, Any] = {"timeout": timeout, "retries": retries}
        if self.kind == "blocking":
            blocking: Any = Client if one else Replicas
            with blocking(target, key, **options) as client:
                return getattr(client, method)(*arguments, **named)

        async def run() -> Any:
            awaited: Any = AsyncClient if one else AsyncReplicas
            async with awaited(target, key, **options) as client:
                return await getattr(client, method)(*arguments, **named)

        return asyncio.run(run())


@pytest.fixture(params=["blocking", "awaited"])
def caller(request: pytest.FixtureRequest) -> Caller:
    return Caller(request.param)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the machine, and short pauses."""
    for name in (ADMIN_KEY, URL, "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(repeat, "FIRST_SECONDS", 0.005)


@pytest.fixture
def journal() -> list[tuple[str, str]]:
    """URL and call of everything that any server was asked, in order."""
    return []


@pytest.fixture
def start(journal: list[tuple[str, str]]) -> Iterator[Callable[..., Server]]:
    """Starts servers."""
    started: list[Server] = []

    def begin(port: int = 0, opened: str | None = None) -> Server:
        started.append(Server(journal, port, opened))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """`w0`, `w1` and `w2` of 40, 44 and 48 bytes, a file each; two chunks of 84 bytes."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for index in range(3):
        save_file({f"w{index}": torch.full((10 + index,), float(index))}, folder / f"{index}.safetensors")
    return folder

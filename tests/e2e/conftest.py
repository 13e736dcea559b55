# SPDX-License-Identifier: Apache-2.0
"""Real servers on tiny models, each started once per test session, two at a time."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python.processes import Popen
from safetensors.torch import load_file, save_file

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import SMALL, Server

from .ask import state
from .block_fp8 import write_block_fp8
from .native_trainer import TRANSFER
from .plugins import HERE, variables

TWO_RANKS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
OPTIONS = (*SMALL, "--block-size", "32", "--max-logprobs", "128", "--enable-prompt-tokens-details")

PATIENCE_SECONDS = 8.0
"""How long these servers wait for a broadcast."""

DEV = {"VLLM_SERVER_DEV_MODE": "1"}
"""Has vLLM's routes for trainers."""

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
"""Speculative decoding whose drafts are looked up in a request's own tokens."""

SERVED = {"servers", "others", "faulty", "drafting"}
"""Fixtures that are servers."""

if torch.cuda.device_count() == 0:  # CUDA is not for forks
    Server.popen = Popen

FIRST = pytest.mark.parametrize("server", ["tp1", pytest.param("tp2", marks=pytest.mark.full)], indirect=True)
SECOND = pytest.mark.parametrize(
    "server", [pytest.param("tp1", marks=pytest.mark.full), "tp2"], indirect=True
)
"""For tests that `make test` has on the first of the two servers alone, or on the second."""

DRAFTS = pytest.param("drafts", marks=pytest.mark.full)
"""The server with drafts, for tests that `make test` has on another one."""

COLD: dict[str, dict[str, Any]] = {}
"""What each server served before its first update."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ask servers; those that start engines of their own can share the machine."""
    for item in items:
        asked = item.fixturenames if isinstance(item, pytest.Function) else ()
        if item.path.is_relative_to(HERE) and SERVED.intersection(asked):
            item.add_marker("alone")


@contextmanager
def answering(*servers: Server) -> Iterator[None]:
    """Servers that were started together: all of them answer once it begins, and end with it."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        for server in servers:
            stack.enter_context(server)
        list(pool.map(Server.wait, servers))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one folder that servers may read checkpoints from."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def servers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One server with one rank, which queues steps ahead, and one with two, which takes vLLM's own weight transfer, too. Both
    are on the early checkpoint."""
    logs = tmp_path_factory.mktemp("logs")
    settings = {"allowed_dirs": [str(folder)], "upload_idle_seconds": PATIENCE_SECONDS}
    started = {
        "tp1": Server(
            EARLY,
            logs / "tp1.log",
            arguments=OPTIONS,
            settings=settings,
            variables=variables(logs, "fp8ext_batches"),
        ),
        "tp2": Server(
            EARLY,
            logs / "tp2.log",
            arguments=(*OPTIONS, *TWO_RANKS, *TRANSFER),
            settings=settings,
            variables={**variables(logs, ranks=2), **DEV},
        ),
    }
    with answering(*started.values()):
        COLD.update({name: state(server) for name, server in started.items()})
        yield started


@pytest.fixture(scope="session")
def drafting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with speculative decoding, on the early checkpoint."""
    logs = tmp_path_factory.mktemp("drafting")
    started = Server(
        EARLY,
        logs / "log",
        arguments=(*OPTIONS, "--speculative-config", json.dumps(NGRAM)),
        settings={"allowed_dirs": [str(folder)]},
        variables=variables(logs),
    )
    with answering(started):
        yield started


@pytest.fixture(params=["tp1", "tp2"])
def server(request: pytest.FixtureRequest) -> Server:
    """One of the two servers, or the one with drafts, serving the early checkpoint."""
    if request.param == "drafts":
        return on_early(request.getfixturevalue("drafting"))
    return on_early(request.getfixturevalue("servers")[request.param])


@pytest.fixture
def single(servers: dict[str, Server]) -> Server:
    """The server with one rank, serving the early checkpoint."""
    return on_early(servers["tp1"])


@pytest.fixture
def pair(servers: dict[str, Server]) -> Server:
    """The server with two ranks, serving the early checkpoint."""
    return on_early(servers["tp2"])


def on_early(server: Server) -> Server:
    """Make sure that no update is open and that the early checkpoint is served."""
    with server.client() as client:
        weights = client.weights()
        if weights.update:
            client.abandon(weights.update)
        if weights.version != "early":
            client.push(EARLY, version="early")
    return server


@pytest.fixture(scope="session")
def spoiled(folder: Path) -> Callable[..., Path]:
    """Writes the late checkpoint with changes: `spoiled(name, tensor=replacement)`; None leaves a tensor out."""

    def write(file: str, **changes: torch.Tensor | None) -> Path:
        tensors = load_file(LATE / "model.safetensors")
        for name, tensor in changes.items():
            tensors.pop(name.replace("__", "."), None)
            if tensor is not None:
                tensors[name.replace("__", ".")] = tensor.contiguous()
        path = folder / f"{file}.safetensors"
        save_file(tensors, path)
        return path

    return write


@pytest.fixture(scope="session")
def block_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The late checkpoint in DeepSeek's format."""
    folder = tmp_path_factory.mktemp("block_fp8")
    write_block_fp8(LATE, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((LATE / name).read_bytes())
    return folder

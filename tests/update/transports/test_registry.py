# SPDX-License-Identifier: Apache-2.0
"""Every transport has a folder, an entry in the registry, a source that survives JSON, and a receiver."""

import json
from pathlib import Path
from typing import get_args

import pytest

from vllm_fp8ext.serve.client.options import Transport
from vllm_fp8ext.serve.client.transports.registry import SENDERS
from vllm_fp8ext.update.contract.native_handles import ExportedTensor
from vllm_fp8ext.update.contract.regular_file import Stamp
from vllm_fp8ext.update.transports.files.message import FileSource
from vllm_fp8ext.update.transports.http.message import UploadSource
from vllm_fp8ext.update.transports.ipc.message import IpcSource
from vllm_fp8ext.update.transports.native.message import NativeSource
from vllm_fp8ext.update.transports.native_ipc.message import NativeIpcSource
from vllm_fp8ext.update.transports.nccl.message import BroadcastSource
from vllm_fp8ext.update.transports.receiver import RankDevice, Receiver, Receivers
from vllm_fp8ext.update.transports.registry import TRANSPORTS, source_from_dict
from vllm_fp8ext.update.transports.transport import Source

PROJECT = Path(__file__).resolve().parents[3]
SOURCES: dict[str, Source] = {
    "http": UploadSource("/dev/shm/fp8ext-1.spool", 4096),
    "files": FileSource("/models/a.safetensors", Stamp(1, 2, 3, 4, 5), "/models"),
    "ipc": IpcSource("GPU-1", (("handle", 8), ("other", 16))),
    "native": NativeSource(
        native=1,
        backend="gloo",
        host="host",
        port=1,
        unique_id=None,
        size=2,
        first_rank=1,
        parts=(64, 32),
        moves=((1, 2, 3),),
        bytes=96,
        seconds=60.0,
    ),
    "native_ipc": NativeIpcSource(
        gpus={
            "GPU-1": [
                ExportedTensor(
                    handle="AAAA",
                    storage_bytes=64,
                    storage_offset=512,
                    counter="/torch_1_2_3",
                    counter_offset=4,
                    event="AAAA",
                    wait=True,
                    start=8,
                    size=16,
                )
            ]
        },
        packed=False,
    ),
    "nccl": BroadcastSource("gloo", "host:1/name", 3, 1, 64, "00" * 8, 60.0),
}
"""One source of each transport."""


def folders(room: str) -> set[str]:
    return {path.parent.name for path in (PROJECT / room).glob("*/__init__.py")}


def test_folders_and_entries_have_the_same_names() -> None:
    assert set(TRANSPORTS) == folders("vllm_fp8ext/update/transports") == set(SOURCES)
    assert set(SENDERS) == folders("serve/client/transports") == set(get_args(Transport))
    assert set(SENDERS) <= set(TRANSPORTS)


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_survives_the_way_to_the_ranks(name: str) -> None:
    source = SOURCES[name]
    assert isinstance(source, TRANSPORTS[name].source)
    assert source_from_dict(json.loads(json.dumps(source.as_dict()))) == source


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_opened_by_its_transports_receiver(name: str) -> None:
    receiver = TRANSPORTS[name].load_receiver()
    assert issubclass(receiver, Receiver)
    receivers = Receivers()
    assert type(receivers._receiver(name)) is receiver
    assert receivers._receiver(name) is receivers._receiver(name)
    assert isinstance(receivers._receiver(name)._rank, RankDevice)


@pytest.mark.parametrize("name", SOURCES)
def test_documentation_names_every_transport(name: str) -> None:
    """The client's page by name; the API's page and its schema by route."""
    if name in SENDERS:
        assert f'"{name}"' in (PROJECT / "docs" / "client.md").read_text()
    route = TRANSPORTS[name].route
    if route is not None:
        assert f"/updates/{{id}}/{route.path}" in (PROJECT / "docs" / "http-api.md").read_text()
        assert f"/updates/{{id}}/{route.path}" in (PROJECT / "docs" / "openapi.json").read_text()

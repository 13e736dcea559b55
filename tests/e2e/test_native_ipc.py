# SPDX-License-Identifier: Apache-2.0
"""vLLM's own IPC trainer engine against real servers, with shared memory in place of a GPU's."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file
from shared_exports import SharedExports, shared_exports, without_cuda
from torch import Tensor
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

from vllm_fp8ext.bench.native import HeldTensors
from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.adapters.vllm import WeightSyncClient
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .conftest import OPTIONS, TWO_RANKS, answering, on_early
from .plugins import variables

TRANSFER = ("--weight-transfer-config", '{"backend": "ipc"}')
BUFFER = 2 << 20
pytestmark = [pytest.mark.alone, pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    logs = tmp_path_factory.mktemp("native-ipc")
    started = {
        "typed": Server(
            EARLY,
            logs / "tp1.log",
            arguments=(*OPTIONS, *TRANSFER),
            variables=variables(logs),
        ),
        "pickled": Server(
            EARLY,
            logs / "tp2.log",
            arguments=(*OPTIONS, *TRANSFER, *TWO_RANKS),
            settings={"native_pickled_handles": True},
            variables=variables(logs, ranks=2),
        ),
    }
    with answering(*started.values()):
        yield started


@pytest.fixture
def exports() -> Iterator[SharedExports]:
    with shared_exports() as made:
        yield made


def late() -> dict[str, Tensor]:
    return load_file(LATE / "model.safetensors")


def pushed(client: Any, exports: SharedExports, tensors: dict[str, Tensor], *, packed: bool) -> None:
    """What a trainer does once."""
    with without_cuda(exports):
        init = IPCTrainerInitInfo(rank=0, packed=packed, packed_buffer_size_bytes=BUFFER)
        engine = IPCTrainerWeightTransferEngine.trainer_init(init, client=client, source=HeldTensors(tensors))
        engine.send_weights()


def require_late(server: Server) -> None:
    with server.client() as client:
        manifest = Manifest.from_dict(client.manifest())
        assert client.digests().digests == checkpoint_digests(LATE / "model.safetensors", manifest)
        client.verify()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["typed", "pickled"])
def test_vllms_trainer_engine_hands_tensors_over_typed(
    servers: dict[str, Server], exports: SharedExports, name: str, packed: bool
) -> None:
    server = on_early(servers[name])
    pushed(WeightSyncClient(server.url, server.key), exports, late(), packed=packed)
    require_late(server)


@pytest.mark.parametrize("packed", [True, False])
def test_vllms_own_client_pickles_which_a_setting_allows(
    servers: dict[str, Server], exports: SharedExports, packed: bool
) -> None:
    server = on_early(servers["pickled"])
    client = HTTPVLLMWeightSyncClient(server.url.replace("http://", f"http://x:{server.key}@"))
    pushed(client, exports, late(), packed=packed)
    require_late(server)


def test_pickles_are_refused_without_the_setting(servers: dict[str, Server], exports: SharedExports) -> None:
    server = on_early(servers["typed"])
    client = HTTPVLLMWeightSyncClient(server.url.replace("http://", f"http://x:{server.key}@"))
    with pytest.raises(requests.HTTPError, match="422"):
        pushed(client, exports, late(), packed=True)
    typed = WeightSyncClient(server.url, server.key)
    with pytest.raises(UpdateError, match=r"pickled-handles.*native_pickled_handles"):
        typed.finish_weight_update()
    pushed(typed, exports, late(), packed=True)
    require_late(server)


def test_what_is_refused_ends_the_update_and_the_next_one_goes_through(
    servers: dict[str, Server], exports: SharedExports
) -> None:
    server = on_early(servers["typed"])
    client = WeightSyncClient(server.url, server.key)
    with server.client() as ours:
        before = ours.digests().digests
    for kind, change in {
        "unknown-tensor": {"model.other": torch.ones(4, dtype=torch.bfloat16)},
        "wrong-shape": {"model.norm.weight": torch.ones(7, dtype=torch.bfloat16)},
        "non-finite": {"model.norm.weight": torch.full((256,), torch.nan, dtype=torch.bfloat16)},
        "incomplete": {"model.layers.0.self_attn.q_proj.weight": None},
    }.items():
        sent = {name: tensor for name, tensor in {**late(), **change}.items() if tensor is not None}
        with pytest.raises(UpdateError) as refused:
            pushed(client, exports, sent, packed=False)
        assert refused.value.kind == kind
    client.start_weight_update()
    with pytest.raises(UpdateError, match="expected a list of 1"):
        client.update_weights(
            {
                "names": ["model.norm.weight"],
                "dtype_names": ["bfloat16"],
                "shapes": [[256]],
                "ipc_handles": [],
            }
        )
    with server.client() as ours:
        assert ours.digests().digests == before
    pushed(client, exports, late(), packed=False)
    require_late(server)

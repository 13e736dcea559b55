# SPDX-License-Identifier: Apache-2.0
"""A server that starts without weights, to which a trainer brings them by its worker extension, over HTTP."""

import os
from collections.abc import Iterator

import httpx
import pytest

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import MODEL, Server
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .ask import complete
from .conftest import OPTIONS, answering
from .native_trainer import Trainer
from .plugins import HERE, variables

pytestmark = [pytest.mark.full, pytest.mark.alone]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("empty")
    environment = variables(folder)
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(HERE)])
    extension = ("--worker-extension-cls", "loading_worker.LoadingWorker")
    arguments = (*OPTIONS, "--load-format", "dummy", *extension)
    server = Server(EARLY, folder / "log", arguments=arguments, settings={}, variables=environment)
    with answering(server):
        yield server


def test_requests_are_refused_until_a_first_full_update(empty: Server) -> None:
    asked = {"model": MODEL, "prompt": "1+2=", "max_tokens": 4}
    refused = httpx.post(f"{empty.url}/v1/completions", json=asked, timeout=60)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "no-weights")
    assert httpx.get(f"{empty.url}/health", timeout=60).status_code == 200
    names = sorted(dict(stored(LATE)))
    with Trainer(empty) as trainer, empty.client() as client:
        assert client.weights().state == "no-weights"
        part = {
            "method": "load",
            "args": [str(LATE), names[:4]],
            "kwargs": {"end": "finalize_layerwise_reload"},
        }
        for method in ("update_weights", "load_model", "fp8ext"):
            status, kind, message = trainer.refused("/collective_rpc", {"method": method})
            assert (status, kind) == (422, "invalid-request")
            assert "loading_worker.LoadingWorker" in message
        assert trainer.post("/collective_rpc", part).status_code == 500
        assert client.weights().state == "no-weights"
        whole = {"method": "load", "args": [str(LATE), names], "kwargs": {"end": "finalize_layerwise_reload"}}
        assert trainer.call("/collective_rpc", whole)["results"] != [None]
        assert client.weights().state == "serving"
        assert client.digests().digests == checkpoint_digests(LATE)
    assert complete(empty, "1+2=", 4)["choices"][0]["token_ids"]

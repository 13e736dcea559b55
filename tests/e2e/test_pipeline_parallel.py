# SPDX-License-Identifier: Apache-2.0
"""Servers of two pipeline stages (`--pipeline-parallel-size 2`), of one rank or two each, updated as one model.

The embedding of the model is its output layer, too: it lies on both stages.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.demo.server import SMALL, Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from . import mixture
from .ask import ATTEMPTS, Stream, complete, metrics, nats_behind, outputs
from .fault_cells import DEAD, PATIENT_SECONDS, PIPELINE_CELLS, Cell, FaultyServer, run
from .native_trainer import Trainer
from .plugins import variables

STAGES = ("--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IN_ORDER = sorted(PIPELINE_CELLS, key=lambda cell: (cell.expected == DEAD, cell.kind == "hang"))
TOKENS = 300
MANY_TOKENS = 500
COMMITS = 6
"""Commits that a request must meet: with steps in flight or without."""
REQUESTS = 4
Key = tuple[int, float]
pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(1800)]
BOTH = pytest.mark.parametrize("ranks", [1, 2], indirect=True, ids=["TP1", "TP2"], scope="module")


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Digests and answers of a server of two stages that starts on the late checkpoint."""
    folder = tmp_path_factory.mktemp("cold")
    server = Server(
        LATE,
        folder / "log",
        arguments=(*SMALL, *STAGES),
        variables={**variables(folder, "fp8ext_cpu_stages"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    with server:
        server.wait(600)
        return served(server)


def served(server: Server) -> list[Any]:
    """Digests, and answers."""
    with server.client() as client:
        return [client.digests().digests, outputs(server)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Key], FaultyServer]]:
    """A server, by the ranks of a stage and by its deadline; one at a time, started again when it has ended."""
    folder = tmp_path_factory.mktemp("stages")
    servers: dict[Key, FaultyServer] = {}

    def running(key: Key) -> FaultyServer:
        server = servers.get(key)
        if server is None or server.process.poll() is not None:
            stack.close()
            servers.clear()
            ranks, deadline = key
            server = FaultyServer(folder, ranks, stages=2, deadline_seconds=deadline)
            servers[key] = stack.enter_context(server)
            server.wait(600)
        return server

    with ExitStack() as stack:
        yield running


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> int:
    """Tensor-parallel size."""
    return getattr(request, "param", 1)


@pytest.fixture
def server(ranks: int, started: Callable[[Key], FaultyServer]) -> FaultyServer:
    """The server, with the early checkpoint and no update open."""
    server = started((ranks, PATIENT_SECONDS))
    server.fault.unlink(missing_ok=True)
    with server.client() as client:
        weights = client.weights()
        if weights.update:
            client.abandon(weights.update)
        if weights.version != "early":
            client.push(server.early, version="early")
    return server


def spans(choice: dict[str, Any]) -> list[tuple[int, str]]:
    """Epochs and versions of an answer."""
    return [(span["epoch"], span["version"]) for span in choice["weight_versions"]]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_three_stages_without_weights_get_them(cold: list[Any], tmp_path: Path, *, tied: bool) -> None:
    """The one between has neither embedding nor output layer, which answer alike here, tied or not."""
    model = tmp_path / "model"
    shutil.copytree(LATE, model)
    if not tied:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
        tensors = load_file(model / "model.safetensors")
        save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, model / "model.safetensors")
    server = Server(
        model,
        tmp_path / "log",
        arguments=(*SMALL, "--pipeline-parallel-size", "3", *STAGES[2:], "--load-format", "dummy"),
        variables={**variables(tmp_path, "fp8ext_cpu_stages"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    with server, server.client() as client:
        server.wait(600)
        manifest = Manifest.from_dict(client.manifest())
        assert client.weights().state == "no-weights"
        client.push(model, version="late")
        digests, answers = served(server)
    assert digests == checkpoint_digests(model, manifest)
    assert answers == cold[1]
    assert manifest.tied == ({HEAD: EMBEDDING} if tied else {})
    ranks = {name: [piece.rank for piece in pieces] for name, pieces in manifest.pieces.items()}
    assert ranks[EMBEDDING] == ([0, 2] if tied else [0])
    assert tied or ranks[HEAD] == [2]


def test_experts_and_scales_lie_on_the_stage_of_their_layer(tmp_path: Path) -> None:
    """A mixture of experts with static scales of its FP8 KV cache, and an output layer in FP8."""
    server = Server(
        mixture.EARLY,
        tmp_path / "log",
        arguments=(*SMALL, *STAGES, "--kv-cache-dtype", "fp8"),
        settings={"kv_scales": {"policy": "static", "default": 0.5}, "lm_head": "blockfp8"},
        variables={**variables(tmp_path, "fp8ext_cpu_stages"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    with server, server.client() as client:
        server.wait(600)
        manifest = Manifest.from_dict(client.manifest())
        before = served(server)
        client.push(mixture.LATE, version="late")
        assert client.digests().digests == checkpoint_digests(mixture.LATE, manifest)
        scales = client.kv_scales().scales
        client.rollback()
        assert served(server) == before
    layers = {name.rpartition(".layers.")[2].partition(".")[0] for name in scales}
    assert layers == {name.split(".")[2] for name in manifest.tensors if name.startswith("model.layers.")}
    experts = {
        name: {piece.rank for piece in pieces}
        for name, pieces in manifest.pieces.items()
        if "experts" in name
    }
    assert set(map(frozenset, experts.values())) == {frozenset({0}), frozenset({1})}


def test_an_update_serves_what_a_cold_start_does(cold: list[Any], server: FaultyServer) -> None:
    before = served(server)
    with server.client() as client:
        epoch = client.weights().epoch
        client.push(server.late, version="late")
        assert served(server) == cold
        assert client.verify().ranks == 2
        rolled_back = client.rollback()
        assert (rolled_back.epoch, rolled_back.version) == (epoch + 2, "early")
    assert served(server) == before != cold


@BOTH
def test_the_manifest_is_of_the_whole_model(server: FaultyServer) -> None:
    """Each stage has its layers; the embedding, which is the output layer, lies on the first and the last."""
    with server.client() as client:
        manifest = Manifest.from_dict(client.manifest())
        epoch = client.weights().epoch
        client.push(server.late, version="late")
        assert client.digests().digests == checkpoint_digests(server.late, manifest)
        assert client.verify().ranks == manifest.world_size == 2 * server.ranks
        [choice] = complete(server, "12+34=")["choices"]
        assert spans(choice) == [(epoch + 1, "late")]
        client.rollback()
        assert client.digests().digests == checkpoint_digests(server.early, manifest)
    assert manifest.tensors.keys() == load_file(server.late / "model.safetensors").keys()
    assert manifest.tied == {HEAD: EMBEDDING}
    stages = {
        name: {piece.rank // server.ranks for piece in pieces} for name, pieces in manifest.pieces.items()
    }
    assert stages[EMBEDDING] == {0, 1}
    layers = [stages[name] for name in sorted(stages) if name.startswith("model.layers.")]
    assert {0} in layers
    assert {1} in layers
    assert {0, 1} not in layers
    assert set(metrics(server, "fp8ext:epoch").values()) == {epoch + 2}


def test_what_is_refused_changes_no_stage(server: FaultyServer) -> None:
    tensors = load_file(server.late / "model.safetensors")
    before = served(server)
    with server.client() as client:
        for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
            spoiled = tensors[name].clone()
            spoiled[3] = torch.nan
            body = save({**tensors, name: spoiled})
            update = client.open(version="late")
            with pytest.raises(UpdateError) as refused:
                client.put_chunk(update.id, 0, body, len(body))
            assert [(of["kind"], of["tensor"]) for of in refused.value.details["problems"]] == [
                ("non-finite", name)
            ]
            client.abandon(update.id)
            body = save({other: tensor for other, tensor in tensors.items() if other != name})
            update = client.open(version="late")
            client.put_chunk(update.id, 0, body, len(body))
            with pytest.raises(UpdateError) as incomplete:
                client.commit(update.id)
            assert (incomplete.value.kind, incomplete.value.details["missing"]) == ("incomplete", [name])
            client.abandon(update.id)
            unknown = save({name.replace("model.", "model.other."): tensors[name]})
            update = client.open(version="late")
            with pytest.raises(UpdateError, match="unknown-tensor"):
                client.put_chunk(update.id, 0, unknown, len(unknown))
            client.abandon(update.id)
        other_head = tensors[EMBEDDING].clone()
        other_head[0, 0] += 1
        body = save({**tensors, HEAD: other_head})
        update = client.open(version="late")
        with pytest.raises(UpdateError, match="tied-differs"):
            client.put_chunk(update.id, 0, body, len(body))
        client.abandon(update.id)
        with pytest.raises(UpdateError) as unavailable:
            client.open(canary={"prompts": [[1, 2, 3]]})
        assert unavailable.value.kind == "canary-unavailable"
        assert "layers on other pipeline stages" in str(unavailable.value)
    assert served(server) == before
    assert (
        "no canary: this model has layers that can't be computed beside the engine" in server.log.read_text()
    )


@BOTH
@pytest.mark.parametrize(
    ("running", "changed"),
    [("keep", "model.norm.weight"), ("recompute", EMBEDDING)],
    ids=["keep", "recompute"],
)
def test_every_token_is_of_the_weights_that_its_label_names(
    server: FaultyServer, tmp_path: Path, running: str, changed: str
) -> None:
    """A negated last norm samples the token that the other weights like least, from the same K and V, while four requests
    are in both stages. With the rows of the embedding moved by one, a model answers as if each token were the next one: a
    step whose stages had one of both embeddings each would sample what neither of them does."""
    tensors = load_file(LATE / "model.safetensors")
    tensor = tensors[changed]
    tensors[changed] = tensor.roll(-1, 0).contiguous() if changed == EMBEDDING else -tensor
    save_file(tensors, tmp_path / "changed.safetensors")
    folders = {"late": LATE, "changed": tmp_path / "changed.safetensors"}
    with server.client() as client:
        for version, folder in folders.items():
            client.push(folder, version=version)
        for _ in range(ATTEMPTS):
            streams = [Stream(server, f"{12 + number}+34=", MANY_TOKENS) for number in range(REQUESTS)]
            while any(stream.running for stream in streams):
                client.rollback(running)
                time.sleep(0.1)  # for the requests
            commits = max(len(stream.weight_versions) for stream in streams) - 1
            if commits >= COMMITS:
                break
        assert commits >= COMMITS, "too few commits met a request"
        for version, folder in folders.items():
            client.push(folder, version=version)
            for number, stream in enumerate(streams):
                assert stream.finish == "length"
                prompt = complete(server, f"{12 + number}+34=", 1)["choices"][0]["prompt_token_ids"]
                behind = nats_behind(server, prompt, stream.token_ids)
                for span in stream.weight_versions:
                    result = behind[span["start"] : span["end"]]
                    if span["version"] == version:
                        assert all(nats < 5 for nats in result), (version, span, result)


@pytest.mark.parametrize("how", ["keep", "wait", "abort"])
def test_running_requests_are_treated_as_asked(server: FaultyServer, how: str) -> None:
    with server.client() as client, ThreadPoolExecutor() as pool:
        epoch = client.weights().epoch
        streams = list(pool.map(lambda number: Stream(server, f"{number}+1=", TOKENS), range(REQUESTS)))
        client.push(server.late, version="late", running=how)
        [choice] = complete(server, "12+34=")["choices"]
        assert spans(choice) == [(epoch + 1, "late")]
        for stream in streams:
            stream.wait()
            versions = [(span["epoch"], span["version"]) for span in stream.weight_versions]
            assert versions in (
                [(epoch, "early")],
                [(epoch, "early"), (epoch + 1, "late")],
                [(epoch + 1, "late")],
            )
            if how == "wait":
                assert versions == [(epoch, "early")]
            if how != "abort":
                assert (stream.finish, len(stream.token_ids)) == ("length", TOKENS)


def test_others_ways_reach_every_stage(server: FaultyServer) -> None:
    """vLLM's weight transfer, and `load_weights` in workers."""
    with server.client() as client, Trainer(server) as trainer:
        manifest = Manifest.from_dict(client.manifest())
        trainer.init()
        trainer.push(load_file(server.late / "model.safetensors"), version="late")
        assert client.digests().digests == checkpoint_digests(server.late, manifest)
        body = {
            "method": "load_in_buckets",
            "args": [str(server.early), 3, "process_weights_after_loading"],
        }
        headers = {"Authorization": f"Bearer {server.key}"}
        epoch = client.weights().epoch
        httpx.post(f"{server.url}/collective_rpc", json=body, headers=headers, timeout=300).raise_for_status()
        assert client.digests().digests == checkpoint_digests(server.early, manifest)
        assert client.weights().epoch == epoch + 1


def test_slices_of_a_rank_are_of_its_stage(server: FaultyServer) -> None:
    with server.client() as client:
        parts = [client.manifest(rank=rank)["tensors"] for rank in (0, 1)]
    assert "model.norm.weight" not in parts[0]
    assert "model.norm.weight" in parts[1]
    assert EMBEDDING in parts[0].keys() & parts[1].keys()
    assert parts[0]["model.layers.0.mlp.down_proj.weight"]["slices"] == [
        "model.layers.0.mlp.down_proj.weight"
    ]


def test_a_pause_of_others_lasts(server: FaultyServer) -> None:
    headers = {"Authorization": f"Bearer {server.key}"}
    httpx.post(f"{server.url}/pause?mode=keep", headers=headers, timeout=120).raise_for_status()
    with server.client() as client:
        try:
            with pytest.raises(UpdateError) as paused:
                client.push(server.late, version="late")
            assert paused.value.kind == "paused"
        finally:
            httpx.post(f"{server.url}/resume", headers=headers, timeout=120).raise_for_status()
        client.push(server.late, version="late")


@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell)) for cell in IN_ORDER])
def test_faults(started: Callable[[Key], FaultyServer], cell: Cell) -> None:
    """A fault on the last stage leaves both as they were, or poisons both, or ends the server."""
    deadline = cell.deadline_seconds if cell.kind == "hang" else PATIENT_SECONDS
    run(started((cell.ranks, deadline)), cell)

# SPDX-License-Identifier: Apache-2.0
"""vLLM's own weight transfer on a real server: one and two ranks, over Gloo, as trainers drive it."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .conftest import DEV, OPTIONS, PATIENCE_SECONDS, answering, on_early
from .gloo_trainer import Beside
from .native_trainer import BUCKET, TRANSFER, Trainer, free_port
from .plugins import HERE, variables

TRAINERS = Path(sys.prefix) / "trainers"
"""Where TRL lies, out of sight of vLLM."""
TRL_SECONDS = 1500
pytestmark = [pytest.mark.alone, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def natives(
    servers: dict[str, Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    logs = tmp_path_factory.mktemp("native")
    settings = {"upload_idle_seconds": PATIENCE_SECONDS, "allowed_dirs": [str(LATE)]}
    single = Server(
        EARLY,
        logs / "tp1.log",
        arguments=(*OPTIONS, *TRANSFER),
        settings=settings,
        variables={**variables(logs), **DEV},
    )
    with answering(single):
        yield {"tp1": single, "tp2": servers["tp2"]}


@pytest.fixture(params=["tp1", pytest.param("tp2", marks=pytest.mark.full)])
def native(request: pytest.FixtureRequest, natives: dict[str, Server]) -> Server:
    return on_early(natives[request.param])


ON_BOTH = pytest.mark.parametrize("native", ["tp1", "tp2"], indirect=True)
"""For tests that `make test` has on two ranks, too; it has the others on one."""


@pytest.fixture
def single_native(natives: dict[str, Server]) -> Server:
    return on_early(natives["tp1"])


def late() -> dict[str, Tensor]:
    return load_file(LATE / "model.safetensors")


def served(server: Server) -> Any:
    with server.client() as client:
        return client.digests().digests


def manifest(server: Server) -> Manifest:
    with server.client() as client:
        return Manifest.from_dict(client.manifest())


def expected(server: Server, folder: Path = LATE / "model.safetensors") -> Any:
    return checkpoint_digests(folder, manifest(server))


@pytest.fixture
def trainer(native: Server) -> Iterator[Trainer]:
    with Trainer(native) as made:
        made.init()
        yield made


@pytest.fixture
def single_trainer(single_native: Server) -> Iterator[Trainer]:
    with Trainer(single_native) as made:
        made.init()
        yield made


@pytest.mark.parametrize(("packed", "each"), [(True, None), (True, 1), (False, None), (False, 4)])
def test_served_digests_are_those_of_what_was_sent(native: Server, packed: bool, each: int | None) -> None:
    with Trainer(native, packed=packed) as trainer:
        trainer.init()
        finished = trainer.push(late(), each=each, version="step-1")
        assert (finished["message"], finished["weight_version"]) == ("Weight update finished", "step-1")
        assert finished["kept_count"] == 0
        assert served(native) == expected(native)
        assert trainer.http.get("/weight_info").json() == {"weight_version": "step-1"}
    with native.client() as client:
        assert client.verify().version == "step-1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_converted(single_trainer: Trainer, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in late().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    single_trainer.push(tensors)
    server = single_trainer.server
    assert served(server) == expected(server, tmp_path / "model.safetensors")


def test_tensors_that_lie_unaligned_in_a_bucket(single_trainer: Trainer) -> None:
    """A server reads tensors of other dtypes behind one another."""
    tensors = late()
    norm = "model.norm.weight"
    odd = {
        "model.layers.0.self_attn.k_scale": torch.ones(1, dtype=torch.bfloat16),
        norm: tensors[norm].float(),
    }
    finished = single_trainer.push(odd)
    assert finished["kept_count"] == len(manifest(single_trainer.server).tensors) - 1
    assert served(single_trainer.server)[norm] == expected(single_trainer.server)[norm]


@ON_BOTH
def test_what_does_not_come_stays_and_is_told(trainer: Trainer) -> None:
    before = served(trainer.server)
    prefix = "model.layers.1.self_attn."
    sent = {name: tensor for name, tensor in late().items() if name.startswith(prefix)}
    finished = trainer.push(sent)
    after, wanted = served(trainer.server), expected(trainer.server)
    assert {name: after[name] for name in sent} == {name: wanted[name] for name in sent}
    others = before.keys() - sent
    assert {name: after[name] for name in others} == {name: before[name] for name in others}
    assert finished["kept_count"] == len(others)
    assert set(finished["kept"]) <= others


@pytest.mark.parametrize(
    "wrapped",
    [
        "_orig_mod.{}",
        pytest.param("module.{}", marks=pytest.mark.full),
        "base_model.model.{}",
        lambda name: name.replace("model.", "model.language_model.", 1),
        lambda name: name.replace("model.", "_fsdp_wrapped_module.model.", 1),
        lambda name: name.replace(".weight", ".base_layer.weight"),
    ],
)
def test_names_with_wrappers_are_mapped(single_trainer: Trainer, wrapped: Any) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    sent = wrapped.format(name) if isinstance(wrapped, str) else wrapped(name)
    single_trainer.push({sent: late()[name]})
    assert served(single_trainer.server)[name] == expected(single_trainer.server)[name]


BAD = {
    "unknown-tensor": {"model.layers.0.mlp.other_proj.weight": torch.ones(4, 4, dtype=torch.bfloat16)},
    "wrong-shape": {"model.norm.weight": torch.ones(7, dtype=torch.bfloat16)},
    "non-finite": {"model.norm.weight": torch.full((256,), torch.nan, dtype=torch.bfloat16)},
    "wrong-dtype": {"model.norm.weight": torch.ones(256, dtype=torch.float64)},
}


@pytest.mark.parametrize("kind", BAD)
def test_tensors_that_are_refused_end_the_update_and_the_group_stays(trainer: Trainer, kind: str) -> None:
    before = served(trainer.server)
    trainer.call("/start_weight_update", {})
    sent = late()
    sent.pop("model.norm.weight")
    reply = trainer.send({**BAD[kind], **sent})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (422, kind), reply.text
    assert next(iter(BAD[kind])) in error["message"]
    status, kind_after, message = trainer.refused("/finish_weight_update", {})
    assert (status, kind_after) == (409, "no-update")
    assert error["message"][:40] in message
    assert served(trainer.server) == before
    trainer.push(late())
    assert served(trainer.server) == expected(trainer.server)


def test_a_part_of_a_served_matrix_is_refused(trainer: Trainer) -> None:
    before = served(trainer.server)
    name = "model.layers.0.self_attn.q_proj.weight"
    trainer.call("/start_weight_update", {})
    trainer.send({name: late()[name]})
    status, kind, message = trainer.refused("/finish_weight_update")
    assert (status, kind) == (422, "incomplete")
    assert "k_proj" in message
    assert served(trainer.server) == before
    trainer.push(late())


def test_a_tensor_that_comes_twice_is_refused(single_trainer: Trainer) -> None:
    name = "model.norm.weight"
    single_trainer.call("/start_weight_update", {})
    assert single_trainer.send({name: late()[name]}).status_code == 200
    reply = single_trainer.send({name: late()[name]})
    assert reply.json()["error"]["type"] == "duplicate-tensor"


def test_calls_out_of_order_are_refused(single_native: Server) -> None:
    with Trainer(single_native) as trainer:
        info = {"update_info": {"names": [], "dtype_names": [], "shapes": []}}
        assert trainer.refused("/update_weights", info)[:2] == (409, "no-update")
        assert trainer.refused("/finish_weight_update")[:2] == (409, "no-update")
        trainer.init()
        trainer.call("/start_weight_update")
        assert trainer.refused("/start_weight_update")[:2] == (409, "update-open")
        assert trainer.refused("/shutdown_weight_transfer_engine")[:2] == (409, "update-open")
        assert trainer.refused("/finish_weight_update")[:2] == (422, "incomplete")
        trainer.push(late())
        assert trainer.refused("/finish_weight_update")[:2] == (409, "no-update")
        assert trainer.call("/shutdown_weight_transfer_engine") == {"message": "Weight transfer shut down"}
        trainer.call("/start_weight_update")
        assert trainer.refused("/update_weights", info)[:2] == (409, "not-initialized")
        assert trainer.refused("/start_draft_weight_update")[:2] == (409, "no-draft-model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 1}, "world_size: expected 2"),
        ({"world_size": None}, "expected world_size"),
        ({"rank_offset": 0}, "rank_offset: expected 1"),
        ({"rank_offset": 9}, "expected world_size 10 or more"),
        ({"master_port": None}, "expected master_address and master_port"),
        ({"master_port": "12"}, "master_port: expected"),
        ({"packed": 1}, "packed: expected bool"),
        ({"packed_buffer_size_bytes": 1 << 33}, "receive_bytes"),
        ({"nccl_unique_id_b64": "AAAA"}, "found both"),
        ({"speed": 1}, "found speed"),
    ],
)
def test_a_handshake_that_can_not_be_is_refused_at_once(
    single_native: Server, change: dict[str, Any], message: str
) -> None:
    with Trainer(single_native) as trainer:
        status, kind, told = trainer.refused(
            "/init_weight_transfer_engine", {"init_info": trainer.init_info(**change)}
        )
    assert (status, kind) == (422, "invalid-request")
    assert message in told


@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        ({"dtype_names": ["bf16"]}, "wrong-dtype"),
        ({"shapes": [[-1]]}, "invalid-request"),
        ({"shapes": []}, "invalid-request"),
        ({"names": [""]}, "invalid-request"),
        ({"dtype_names": [7]}, "wrong-dtype"),
        ({"shapes": [["256"]]}, "invalid-request"),
        ({"shapes": [[1 << 60]]}, "invalid-request"),
        ({"packed": "yes"}, "invalid-request"),
        ({"packed_buffer_size_bytes": 1 << 40}, "invalid-request"),
        ({"sparse_indices": [[0]]}, "invalid-request"),
        ({"ipc_handles_pickled": "gASV"}, "pickled-handles"),
    ],
)
def test_metadata_that_can_not_be_measured_is_refused(
    single_trainer: Trainer, lie: dict[str, Any], kind: str
) -> None:
    info = {"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[256]], **lie}
    single_trainer.call("/start_weight_update", {})
    assert single_trainer.refused("/update_weights", {"update_info": info})[:2] == (422, kind)
    single_trainer.push(late())


@pytest.mark.parametrize(("kept", "sent"), [(255, 256), (257, 256)])
def test_a_broadcast_of_another_length_is_noticed(single_trainer: Trainer, kept: int, sent: int) -> None:
    before = served(single_trainer.server)
    single_trainer.call("/start_weight_update", {})
    tensor = {"model.layers.0.self_attn.k_scale": torch.ones(sent, dtype=torch.bfloat16)}
    reply = single_trainer.send(tensor, shapes=[[kept]])
    assert reply.json()["error"]["type"] in ("transfer-failed", "wrong-shape")
    assert served(single_trainer.server) == before
    single_trainer.init()
    single_trainer.push(late())


@pytest.mark.parametrize("bucket", [BUCKET // 2, BUCKET * 2])
def test_buckets_that_end_early_or_late(trainer: Trainer, bucket: int) -> None:
    """The trainer packs otherwise than it said: no rank takes one tensor's bytes for another's."""
    before = served(trainer.server)
    trainer.call("/start_weight_update", {})
    trainer.bucket = bucket
    error = trainer.send(late()).json()["error"]
    assert error["type"] == "transfer-failed"
    assert "expected a broadcast of" in error["message"]
    trainer.bucket = BUCKET
    status, kind, message = trainer.refused("/finish_weight_update")
    assert (status, kind) == (409, "no-update")
    assert "expected a broadcast of" in message
    assert served(trainer.server) == before
    trainer.call("/start_weight_update", {})
    info = {"names": [], "dtype_names": [], "shapes": []}
    assert trainer.refused("/update_weights", {"update_info": info})[:2] == (409, "not-initialized")
    trainer.init()
    trainer.push(late())
    assert served(trainer.server) == expected(trainer.server)


@pytest.mark.parametrize("shape", [[16, 16], [1, 256], [512], [128]])
def test_a_shape_that_is_not_the_tensors(single_trainer: Trainer, shape: list[int]) -> None:
    """It is refused, whether the bytes are as many or not."""
    before = served(single_trainer.server)
    single_trainer.call("/start_weight_update", {})
    reply = single_trainer.send({"model.norm.weight": late()["model.norm.weight"]}, shapes=[shape])
    assert (reply.status_code, reply.json()["error"]["type"]) == (422, "wrong-shape")
    assert served(single_trainer.server) == before
    if shape[-1] in (512, 128):
        single_trainer.init()
    single_trainer.push(late())


def test_a_trainer_that_stops_in_the_middle_of_a_broadcast(trainer: Trainer) -> None:
    """Ranks give it up, and one that is started anew sends again."""
    before, tensors = served(trainer.server), late()
    told = {
        "names": list(tensors),
        "dtype_names": ["bfloat16"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    trainer.call("/start_weight_update", {})
    assert trainer.group is not None
    with Beside(lambda: trainer.post("/update_weights", {"update_info": told})) as answer:
        first = pack_tensors(iter(tensors.items()), lambda item: item[1], trainer.bucket)
        assert first is not None
        trainer.group.broadcast(first.packed_tensor)
        trainer.group = None
    assert answer.result.json()["error"]["type"] in ("transfer-timeout", "transfer-failed")
    assert trainer.refused("/finish_weight_update")[:2] == (409, "no-update")
    assert served(trainer.server) == before
    trainer.init()
    trainer.push(tensors)
    assert served(trainer.server) == expected(trainer.server)


def test_a_trainer_that_is_started_anew_ends_what_it_left_open(trainer: Trainer) -> None:
    trainer.call("/start_weight_update", {})
    some = dict(list(late().items())[:3])
    assert trainer.send(some).status_code == 200
    with Trainer(trainer.server) as another:
        another.init()
        another.push(late())
    assert served(trainer.server) == expected(trainer.server)


def test_a_trainer_that_never_comes(single_native: Server) -> None:
    with Trainer(single_native) as trainer:
        told = trainer.refused("/init_weight_transfer_engine", {"init_info": trainer.init_info()})
        assert told[:2] == (408, "transfer-timeout")
        trainer.init()
        trainer.push(late())


def test_updates_of_both_ways_in_do_not_meet(single_trainer: Trainer) -> None:
    with single_trainer.server.client() as client:
        update = client.open(version="other")
        assert single_trainer.refused("/start_weight_update")[:2] == (409, "update-open")
        client.abandon(update.id)
    single_trainer.call("/start_weight_update")
    with single_trainer.server.client() as client, pytest.raises(UpdateError, match="one at a time"):
        client.open(version="other")


def test_a_pause_around_an_update_lasts_until_it_is_ended(trainer: Trainer) -> None:
    """As TRL's `AsyncGRPOTrainer` does it: a request that is frozen goes on with the new weights."""
    body = {"model": "model", "prompt": "1+1=", "max_tokens": 400, "ignore_eos": True, "temperature": 0.0}
    url = trainer.server.url
    with Beside(
        lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
    ) as answer:
        while not running(url):
            pass
        assert trainer.call("/pause?mode=keep") == {"status": "paused"}
        trainer.push(late(), version="paused")
        assert trainer.http.get("/is_paused").json() == {"is_paused": True}
        assert trainer.call("/reset_prefix_cache") in ({"success": True}, {"success": False})
        assert trainer.call("/resume") == {"status": "resumed"}
    [choice] = answer.result.json()["choices"]
    assert [span["version"] for span in choice["weight_versions"]] == ["early", "paused"]
    assert trainer.http.get("/is_paused").json() == {"is_paused": False}


def running(url: str) -> bool:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return any(
        line.startswith("vllm:num_requests_running{") and float(line.rpartition(" ")[2]) >= 1
        for line in text.splitlines()
    )


def test_a_pause_inside_an_update_ends_with_it(single_trainer: Trainer) -> None:
    single_trainer.call("/start_weight_update")
    single_trainer.call("/pause?mode=keep")
    single_trainer.init()
    assert single_trainer.http.get("/is_paused").json() == {"is_paused": False}


def test_versions_alone(single_trainer: Trainer) -> None:
    told = single_trainer.call("/update_weight_version", {"new_version": "renamed"})
    assert told == {"success": True, "new_version": "renamed"}
    assert single_trainer.http.get("/weight_info").json() == {"weight_version": "renamed"}
    with single_trainer.server.client() as client:
        weights = client.weights()
    assert weights.version == "renamed"
    assert single_trainer.refused("/update_weight_version", {"new_version": "a\nb"})[:2] == (
        422,
        "invalid-request",
    )


def test_what_trl_reads_of_a_server(single_native: Server) -> None:
    with Trainer(single_native) as trainer:
        reply = trainer.http.get("/server_info", params={"config_format": "json"})
    config = reply.json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "nccl"}
    assert config["model_config"]["dtype"] == "torch.bfloat16"
    assert config["model_config"]["max_model_len"] == 2048
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert config["lora_config"] is None
    assert single_native.key not in reply.text


@pytest.mark.parametrize("path", ["/weight_checker", "/reset_mm_cache", "/reset_encoder_cache"])
def test_the_rest_of_dev_mode_is_closed(single_native: Server, path: str) -> None:
    with Trainer(single_native) as trainer:
        assert trainer.post(path, {"method": "x"}).status_code == 403
    assert "VLLM_SERVER_DEV_MODE: weight routes are ours" in single_native.log.read_text(errors="replace")


def test_workers_are_called_by_their_extension_alone(single_native: Server) -> None:
    """Without one the call is as closed as the rest of dev mode; `test_no_weights.py` has one."""
    with Trainer(single_native) as trainer:
        for method in ("x", "_x", "fp8ext", "load_model"):
            status, kind, message = trainer.refused("/collective_rpc", {"method": method})
            assert (status, kind) == (403, "PermissionDeniedError")
            assert "closed on a blockfp8 server without --worker-extension-cls" in message


def test_nobody_comes_in_without_the_key(single_native: Server) -> None:
    url, key = single_native.url, single_native.key
    wrong = base64.b64encode(b"x:wrong").decode()
    right = base64.b64encode(f"x:{key}".encode()).decode()
    with httpx.Client(base_url=url, trust_env=False, transport=httpx.HTTPTransport()) as http:
        for path in ("/start_weight_update", "/update_weights", "/pause", "/sleep", "/resume"):
            assert http.post(path).status_code == 401
            assert http.post(path, headers={"Authorization": "Bearer wrong"}).status_code == 403
            assert http.post(path, headers={"Authorization": f"Basic {wrong}"}).status_code == 403
        for authorization in (f"Bearer {key}", f"Basic {right}"):
            assert http.get("/is_paused", headers={"Authorization": authorization}).status_code == 200
        assert http.get("/server_info").status_code == 401


def test_a_folder_is_loaded_as_prime_rl_asks(single_native: Server) -> None:
    with Trainer(single_native) as trainer:
        assert trainer.http.get("/liveness").json() == {"status": "ok"}
        assert trainer.call("/update_weights", {"weight_dir": str(LATE)}) == {"status": "ok"}
        assert trainer.refused("/update_weights", {"weight_dir": "/etc"})[0] in (403, 404)
        assert trainer.refused("/init_broadcaster", {"host": "x"})[:2] == (409, "not-served")
    assert served(single_native) == expected(single_native)


@pytest.mark.full
@pytest.mark.skipif(not TRAINERS.is_dir(), reason="needs TRL: scripts/setup_env.py --beside")
@pytest.mark.parametrize("way", [("client",), ("native",), ("adapter",), ("adapter", "lora")], ids="-".join)
def test_trl_in_server_mode(single_native: Server, tmp_path: Path, way: tuple[str, ...]) -> None:
    """TRL's own client and trainer; served digests are those of what was trained."""
    with single_native.client() as client:
        epoch = client.weights().epoch
    facts = trl_facts(single_native, tmp_path, *way)
    assert facts["digests"] == expected(single_native, tmp_path / "model.safetensors")
    if way[0] == "client":
        assert (facts["epoch"] - epoch, facts["model"]) == (2, "torch.bfloat16")
        assert len(facts["tokens"]) == 4
        assert min(facts["tokens"]) > 0
    else:
        assert facts["steps"] == 3
        assert facts["epoch"] - epoch >= 4
        assert facts["digests"] != expected(single_native, EARLY / "model.safetensors"), "nothing was trained"


def trl_facts(server: Server, folder: Path, *way: str) -> dict[str, Any]:
    """What `trl_native_scenario` saw."""
    facts, log = folder / "facts.json", folder / "log"
    path = os.pathsep.join(filter(None, [str(TRAINERS), os.environ.get("PYTHONPATH", "")]))
    more = {"PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    more |= {"VLLM_HOST_IP": "127.0.0.1", "GROUP_PORT": str(free_port())}
    script = HERE / "trl_native_scenario.py"
    line = [sys.executable, "-P", str(script), str(facts), server.url, server.key, str(folder), *way]
    with log.open("wb") as file:
        done = subprocess.run(
            line, env=os.environ | more, stdout=file, stderr=subprocess.STDOUT, timeout=TRL_SECONDS
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
    loaded: dict[str, Any] = json.loads(facts.read_text())
    return loaded

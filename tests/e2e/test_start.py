# SPDX-License-Identifier: Apache-2.0
"""Starting a server: what is refused and how, and other kinds of checkpoints."""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from vllm_fp8ext.checkpoints import EARLY, LATE, problems
from vllm_fp8ext.demo.server import SMALL, Server
from vllm_fp8ext.demo.traffic import accuracy, answers
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.memory_plan.memory import Serving, rows
from vllm_fp8ext.memory_plan.model import read_model
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .ask import API_KEY, cache_config, complete, state
from .conftest import answering


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP32 checkpoint with biases, untied embeddings and no dimension that is a multiple of 128."""
    folder = tmp_path_factory.mktemp("ragged")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=192,
        intermediate_size=328,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((LATE / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def others(
    block_fp8: Path, ragged: Path, kv_dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """A server on each of these checkpoints, the first with an FP8 KV cache, where there is any."""
    logs = tmp_path_factory.mktemp("logs")
    started = {
        "block_fp8": Server(
            block_fp8,
            logs / "block_fp8.log",
            arguments=(*SMALL, "--kv-cache-dtype", kv_dtype),
            settings={"kv_scales": {"policy": "static", "default": 1.0}} if kv_dtype == "fp8" else {},
        ),
        "ragged": Server(
            ragged,
            logs / "ragged.log",
            arguments=(*SMALL, "--dtype", "bfloat16", "--api-key", API_KEY),
            settings={
                "scale_format": "pow2",
                "quantize": ["*"],
                "update_lifetime_seconds": 5,
                "upload_idle_seconds": 2,
            },
        ),
    }
    with answering(*started.values()):
        yield started


def test_a_block_fp8_checkpoint_is_served_as_it_is(others: dict[str, Server]):
    server = others["block_fp8"]
    asked = problems(40)
    with server.client() as client:
        manifest = Manifest.from_dict(client.manifest())
        assert client.digests().digests == checkpoint_digests(LATE, manifest)
        assert accuracy(answers(server.url, asked), asked) > 0.95
        client.push(EARLY, version="early")
        assert client.digests().digests == checkpoint_digests(EARLY, manifest)
        assert accuracy(answers(server.url, asked), asked) < 0.6


@pytest.mark.fp8_kv
def test_scales_of_an_fp8_kv_cache_may_be_chosen(others: dict[str, Server]):
    with others["block_fp8"].client() as client:
        scales = client.kv_scales()
    assert scales.policy == "static"
    assert {value for layer in scales.scales.values() for value in (*layer["k"], *layer["v"])} == {1.0}


@pytest.mark.fp8_kv
def test_an_fp8_kv_cache_has_the_planned_blocks(others: dict[str, Server]):
    cache = cache_config(others["block_fp8"])
    serving = Serving(context=2048, kv_bytes=64 << 20, block_size=int(cache["block_size"]))
    planned = {row.blocks for row in rows(read_model(str(LATE)), serving) if row.kv == "fp8"}
    assert planned == {int(cache["num_gpu_blocks"])}


def test_ragged_fp32_with_biases(others: dict[str, Server], ragged: Path):
    server = others["ragged"]
    prompt = "12+34=5678"
    before = complete(server, prompt, 12, ignore_eos=True)["choices"][0]["token_ids"]
    with server.client() as client:
        manifest = Manifest.from_dict(client.manifest())
        assert "model.layers.0.self_attn.q_proj.bias" in manifest.tensors
        assert client.digests().digests == checkpoint_digests(ragged, manifest)
        cold = client.digests()
        zeros = {name: torch.zeros(spec.shape) for name, spec in manifest.tensors.items()}
        other = ragged / "other"
        other.mkdir()
        save_file(zeros, other / "model.safetensors")
        client.push(other)
        assert client.digests().digests == checkpoint_digests(other, manifest) != cold.digests
        client.push(ragged / "model.safetensors")
        again = client.digests()
        assert (again.digests, again.addresses) == (cold.digests, cold.addresses)
    assert complete(server, prompt, 12, ignore_eos=True)["choices"][0]["token_ids"] == before


def test_the_served_model_of_ragged_shapes_is_the_reference(others: dict[str, Server], ragged: Path):
    """Power-of-two scales; biases. Quantization moves log-probabilities, and the served ones move likewise: in BF16 not at
    all, with scales in fp32 by 0.06 of it. They are no farther from the reference than it is from itself in fp32: what is
    rounded otherwise gets other codes."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(ragged, dtype=torch.bfloat16).eval()
    plain = _logprobs(model, TOKENS)
    for layer in model.model.layers:
        _fuse(layer.self_attn, ("q_proj", "k_proj", "v_proj"))
        _fuse(layer.self_attn, ("o_proj",))
        _fuse(layer.mlp, ("gate_proj", "up_proj"))
        _fuse(layer.mlp, ("down_proj",))
    reply = complete(others["ragged"], TOKENS, 1, prompt_logprobs=20)["choices"][0]["prompt_logprobs"][1:]
    result = [(p, int(t), entry["logprob"]) for p, row in enumerate(reply) for t, entry in row.items()]
    places, tokens, values = map(torch.tensor, zip(*result, strict=True))
    bf16, expected = plain[places, tokens], _logprobs(model, TOKENS)[places, tokens]
    in_fp32 = _logprobs(model.float(), TOKENS)[places, tokens]
    moved = expected - bf16
    share = float(moved @ (values - bf16) / (moved @ moved))
    away, noise = (float((other - expected).abs().mean()) for other in (values, in_fp32))
    print(
        f"{share:.2f} of the move is served; {away:.4f} from the reference, which is {noise:.4f} from itself"
    )
    assert share > 0.5
    assert away < 1.2 * noise


TOKENS = [5 + 7 * i % 110 for i in range(60)]


def _logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits.float(), -1)[0, :-1]


def _fuse(parent: Any, names: tuple[str, ...]) -> None:
    """Replace projections by slices of one fused layer in the reference numerics."""
    weight = torch.cat([getattr(parent, name).weight.data for name in names])
    codes, scales = reference.quantize_weight(weight.bfloat16(), "pow2")
    start = 0
    for name in names:
        module = getattr(parent, name)
        rows = module.weight.shape[0]
        module.forward = _slice(codes, scales, start, rows, module.bias)
        start += rows


def _slice(codes: Any, scales: Any, start: int, rows: int, bias: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).bfloat16()
        out = reference.gemm(*reference.quantize_activation(flat, "pow2"), codes, scales)[
            :, start : start + rows
        ]
        out = out.to(x.dtype)
        return (out if bias is None else out + bias).view(*x.shape[:-1], rows)

    return forward


def test_each_key_opens_its_own_door(others: dict[str, Server]):
    server = others["ragged"]
    before = state(server)

    def reply(path: str, key: str) -> int:
        return httpx.get(
            f"{server.url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=30
        ).status_code

    assert [reply("/v1/models", key) for key in (API_KEY, server.key)] == [200, 401]
    assert [reply("/fp8ext/v1/weights", key) for key in (server.key, API_KEY)] == [200, 403]
    assert state(server) == before


def test_an_update_expires(others: dict[str, Server]):
    server = others["ragged"]
    before = state(server)
    with server.client() as client:
        update = client.open(version="late")
        assert update.expires_at is not None
        assert 4 < update.expires_at - update.opened_at < 6
        time.sleep(5.5)
        assert client.update(update.id).state == "expired"
        assert client.weights().update is None
        for call in (client.prepare, client.commit, lambda id: client.put_chunk(id, 0, b"body", 4)):
            with pytest.raises(UpdateError) as refused:
                call(update.id)
            assert (refused.value.kind, refused.value.status) == ("expired", 410)
        assert client.abandon(update.id).state == "expired"
    assert state(server) == before


def uploading(server: Server, id: str) -> socket.socket:
    """A connection by which the first tenth of a chunk has come."""
    head = (
        f"PUT /fp8ext/v1/updates/{id}/chunks/0 HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n"
        f"Authorization: Bearer {server.key}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + b"x" * 100)
    return connection


def test_an_upload_that_stops_gives_its_room_back(others: dict[str, Server]):
    server = others["ragged"]
    before = state(server)
    with server.client() as client:
        update = client.open()
        with uploading(server, update.id) as connection:
            connection.settimeout(30)
            answer = ""
            while "}" not in answer and (piece := connection.recv(4096)):
                answer += piece.decode()
        assert answer.startswith("HTTP/1.1 408")
        assert "upload-stalled" in answer
        client.abandon(update.id)
    assert state(server) == before


def test_an_upload_to_an_update_that_was_given_up_gives_its_room_back(others: dict[str, Server]):
    """However slowly it comes, and it never stops."""
    server = others["ragged"]
    before = state(server)
    with server.client() as client:
        update = client.open()
        with uploading(server, update.id) as connection:
            client.abandon(update.id)
            answer = ""
            for _ in range(300):
                connection.sendall(b"x")
                if select.select([connection], [], [], 0.1)[0]:
                    answer = connection.recv(4096).decode()
                    break
        assert answer.startswith("HTTP/1.1 409"), answer
    assert state(server) == before


def test_the_literal_command_without_plugins_and_key(tmp_path: Path):
    """`vllm serve MODEL --quantization blockfp8` just works; without a key there are no routes, and one line says so."""
    vllm = Path(sys.executable).with_name("vllm")
    server = Server.__new__(Server)  # only its helpers: this one is started by vLLM's own command
    from vllm_fp8ext.demo.server import _free_port

    server.port = _free_port()
    server.url = f"http://127.0.0.1:{server.port}"
    server.log = tmp_path / "literal.log"
    env = {key: value for key, value in os.environ.items() if key != "FP8EXT_ADMIN_KEY"} | {
        "VLLM_PLUGINS": "fp8ext"
    }
    line = [str(vllm), "serve", str(LATE), "--quantization", "blockfp8", "--port", str(server.port), *SMALL]
    with server.log.open("wb") as log:
        line += ["--served-model-name", "model"]
        server.process = subprocess.Popen(
            line, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    with server:
        server.wait()
        asked = problems(20)
        assert accuracy(answers(server.url, asked), asked) > 0.9
        assert httpx.get(f"{server.url}/fp8ext/v1/weights", timeout=120).status_code == 404
        assert (
            server.log.read_text().count("no weight-update routes, because FP8EXT_ADMIN_KEY is not set") == 1
        )

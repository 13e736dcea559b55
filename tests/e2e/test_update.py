# SPDX-License-Identifier: Apache-2.0
"""What must hold after any number of updates, on one rank and on two."""

import json
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.cli import cli
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.safetensors_body import bodies
from vllm_fp8ext.serve.safetensors_file import ranges_of
from vllm_fp8ext.update.contract.checkpoint_files import INDEX
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .ask import arrival_times, outputs, state
from .conftest import COLD, FIRST


@FIRST
def test_random_updates_end_as_cold_starts_do(server: Server, servers, spoiled: Callable[..., Path]):
    cold = COLD[next(name for name, other in servers.items() if other is server)]
    generator = torch.Generator().manual_seed(0)
    odd = spoiled(
        "random", model__layers__0__mlp__down_proj__weight=torch.randn(256, 640, generator=generator).half()
    )
    expected = {}
    with server.client() as client:
        manifest = Manifest.from_dict(client.manifest())
        for label, checkpoint in (("early", EARLY), ("late", LATE), ("odd", odd)):
            expected[label] = checkpoint_digests(checkpoint, manifest)
        choose = random.Random(1)
        served, previous = "early", None
        for _ in range(8):
            epoch = client.weights().epoch
            if previous and choose.random() < 0.35:
                client.rollback(choose.choice(["keep", "recompute"]))
                served, previous = previous, served
            else:
                label, path = choose.choice([("early", EARLY), ("late", LATE), ("odd", odd)])
                running = choose.choice(["keep", "recompute"])
                client.push(
                    path,
                    version=label,
                    running=running,
                    chunk_bytes=choose.choice([1 << 18, 1 << 20, 1 << 30]),
                )
                served, previous = label, served
            now = client.digests()
            assert client.weights().epoch == epoch + 1
            verified = client.verify()
            assert (verified.epoch, verified.ranks) == (epoch + 1, len(now.addresses))
            assert now.digests == expected[served]
            assert now.addresses == cold["digests"]["addresses"]
        client.push(EARLY, version="early")
        assert client.digests().digests == cold["digests"]["digests"] == expected["early"]
    assert outputs(server) == cold["outputs"]


@FIRST
def test_chunks_come_in_any_order_and_again(server: Server):
    parts = list(bodies(ranges_of(LATE), 1 << 17))
    order = list(range(len(parts)))
    random.Random(2).shuffle(order)
    with server.client() as client:
        update = client.open(version="late")
        for n in [*order, *order[:3]]:
            update = client.put_chunk(update.id, n, parts[n])
        assert update.tensors_missing == 0
        assert client.prepare(update.id).state == "prepared"
        committed = client.commit(update.id)
        assert client.commit(update.id) == committed
        seconds = committed.seconds
        phases = [seconds[phase] for phase in ("staging", "prepare", "pause", "verify", "waiting")]
        assert seconds["waiting"] > 0
        assert sum(phases) == pytest.approx(seconds["total"])
        assert client.digests().digests == checkpoint_digests(LATE, Manifest.from_dict(client.manifest()))


def test_long_bodies_are_read_past_uvicorn(single: Server):
    """Through every middleware of vLLM; such a connection is not used again."""
    (body,) = bodies(ranges_of(LATE), 1 << 30)
    with single.client() as client:
        id = client.open().id
        answer = httpx.put(
            f"{single.url}/fp8ext/v1/updates/{id}/chunks/0",
            content=b"".join(body),
            headers={"Authorization": f"Bearer {single.key}"},
            timeout=60,
        )
        assert (answer.status_code, answer.headers.get("Connection")) == (200, "close")
        assert answer.json()["tensors_missing"] == 0
        client.abandon(id)


@FIRST
def test_staging_changes_nothing_that_is_served(server: Server):
    before = state(server)
    with server.client() as client:
        update = client.open(version="late")
        [body] = bodies(ranges_of(LATE), 1 << 30)
        client.put_chunk(update.id, 0, body)
        assert state(server) == before
        client.prepare(update.id)
        assert state(server) == before
        client.abandon(update.id)
    assert state(server) == before


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_update_that_is_gone_on_with_is_of_what_is_pushed_last(single: Server, in_memory: bool):
    """Though chunks of the same number and length, of other weights, have been staged; those that are the same stay."""
    id = f"gone-on-with-{in_memory}"
    with single.client() as client:
        client.push(LATE, version="late")
        wanted = client.digests().digests
        client.rollback()
        client.open(id=id)
        for n, (old, new) in enumerate(
            zip(bodies(ranges_of(EARLY), 1 << 18), bodies(ranges_of(LATE), 1 << 18), strict=True)
        ):
            body = new if n == 1 else old
            client.put_chunk(id, n, body, sha256=body.sha256())
        staged = client.update(id).chunks
        assert [chunk.sha256 for chunk in staged.values()][1] == list(bodies(ranges_of(LATE), 1 << 18))[
            1
        ].sha256().hex()
        weights = load_file(LATE / "model.safetensors") if in_memory else LATE
        done = client.push(weights, id=id, chunk_bytes=1 << 18)
        assert client.digests().digests == wanted
        assert done.bytes == sum(body.length for body in bodies(ranges_of(LATE), 1 << 18))


@FIRST
def test_generation_goes_on_while_an_update_is_staged(server: Server):
    """Tokens arrive between the begin and the end of an upload."""
    arrivals: list[float] = []
    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            arrivals.extend(arrival_times(server, "123+456=", 200))

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        with server.client() as client:
            update = client.open()
            [body] = bodies(ranges_of(LATE), 1 << 30)
            spans: list[tuple[float, float]] = []
            while len(spans) < 20 or (len(spans) < 400 and not arrivals):
                start = time.perf_counter()
                client.put_chunk(update.id, 0, body)
                spans.append((start, time.perf_counter()))
            client.abandon(update.id)
    finally:
        stop.set()
        thread.join()
    assert any(start < moment < end for moment in arrivals for start, end in spans)


@FIRST
def test_rollback_needs_previous_weights(server: Server):
    with server.client() as client:
        client.push(LATE, version="late")
        update = client.open()
        part = next(bodies(ranges_of(EARLY), 1 << 17))
        client.put_chunk(update.id, 0, part)
        assert client.weights().previous_version is None
        client.abandon(update.id)
        with pytest.raises(UpdateError) as refused:
            client.rollback()
        assert (refused.value.kind, refused.value.status) == ("no-previous", 409)


@FIRST
def test_load_from_the_servers_disk(server: Server, spoiled: Callable[..., Path], folder: Path):
    """Of a folder those files that its index names."""
    indexed = folder / "indexed"
    indexed.mkdir(exist_ok=True)
    shutil.copy(LATE / "model.safetensors", indexed)
    save_file({"of.another.form": torch.ones(2)}, indexed / "consolidated.safetensors")
    (indexed / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}))
    with server.client() as client:
        for path in (spoiled("plain"), indexed):
            client.push(EARLY, version="early")
            update = client.load(path, version="late")
            assert update.result["version"] == "late"
            assert client.digests().digests == checkpoint_digests(LATE, Manifest.from_dict(client.manifest()))


def test_other_dtypes_are_converted_as_on_load(single: Server, spoiled: Callable[..., Path]):
    name = "model.layers.1.self_attn.k_proj.weight"
    wide = torch.randn(128, 256, generator=torch.Generator().manual_seed(5)) * 0.1
    with single.client() as client:
        manifest = Manifest.from_dict(client.manifest())
        collected = []
        for tensor in (wide, wide.bfloat16()):
            checkpoint = spoiled("wide", **{name.replace(".", "__"): tensor})
            client.push(checkpoint, version="wide")
            collected.append(client.digests().digests)
            assert collected[-1] == checkpoint_digests(checkpoint, manifest)
    assert collected[0] == collected[1]


def test_digest_command_needs_no_vllm_and_agrees(single: Server, tmp_path: Path):
    """In a process where importing vLLM fails."""
    import json
    import subprocess
    import sys

    script = (
        "import sys; sys.modules['vllm'] = None\n"
        "from vllm_fp8ext.cli import main; sys.argv = ['fp8ext', 'digest', sys.argv[1], '--json']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(LATE)], capture_output=True, text=True, check=True
    )
    with single.client() as client:
        client.push(LATE, version="late")
        assert json.loads(done.stdout) == client.digests().digests


def command(server: Server, *line: str) -> str:
    done = CliRunner().invoke(cli, [*line, "--url", server.url, "--key", server.key])
    assert done.exit_code == 0, done.output
    return done.output


def test_push_command(single: Server):
    assert "version late" in command(single, "push", str(LATE), "--version", "late")
    with single.client() as client:
        assert client.weights().version == "late"


def test_commands_about_what_is_served(single: Server):
    with single.client() as client:
        client.push(EARLY, version="before")
        client.push(LATE, version="after")
        epoch = client.weights().epoch
        update = client.open(version="half")
        shown = command(single, "status")
        assert all(
            text in shown for text in (f"{epoch}, after", f"epoch {epoch - 1}, before", update.id, "half")
        )
        assert command(single, "abandon") == f"update {update.id}, half: abandoned\n"
        assert command(single, "abandon") == "no update is open\n"
        assert f"serves epoch {epoch}, version after" in command(single, "verify")
        assert command(single, "rollback") == f"epoch {epoch + 1} is served, version before\n"
        assert client.weights().version == "before"


def test_to_resume_what_is_not_there_sends_nothing(single: Server):
    with single.client() as client:
        before = client.weights()
        line = ["push", str(LATE), "--resume", "nosuch", "--url", single.url, "--key", single.key]
        with pytest.raises(UpdateError, match="no update nosuch"):
            CliRunner().invoke(cli, line, catch_exceptions=False)
        assert client.weights() == before


@FIRST
def test_base_epoch_guards(server: Server):
    with server.client() as client:
        epoch = client.weights().epoch
        with pytest.raises(UpdateError) as refused:
            client.push(LATE, base_epoch=epoch + 1)
        assert refused.value.kind == "stale-base"
        assert client.push(LATE, base_epoch=epoch).result["epoch"] == epoch + 1


@FIRST
def test_health_while_updating(server: Server):
    with server.client() as client:
        update = client.open()
        assert client.weights().state == "updating"
        assert httpx.get(f"{server.url}/health", timeout=120).is_success
        client.abandon(update.id)
        assert client.weights().state == "serving"

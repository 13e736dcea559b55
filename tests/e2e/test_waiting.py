# SPDX-License-Identifier: Apache-2.0
"""Commits that wait for running requests, and commits that end them."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError

from .ask import ATTEMPTS, Stream, complete, metrics
from .conftest import FIRST, SECOND, on_early


def _prepared(client: Any, checkpoint: Path, **options: Any) -> str:
    """An update that only has to be committed: a stream that is begun now is still running then."""
    update = client.open(version=checkpoint.name, **options)
    body = (checkpoint / "model.safetensors").read_bytes()
    client.put_chunk(update.id, 0, body, len(body))
    return client.prepare(update.id).id


def _refusal(call: Callable[[], Any]) -> UpdateError | None:
    try:
        call()
    except UpdateError as error:
        return error
    return None


def _versions(stream: Stream) -> list[str]:
    return [span["version"] for span in stream.weight_versions]


@SECOND
def test_waiting_lets_running_requests_finish_and_holds_new_ones(server: Server):
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        id = _prepared(client, LATE, running="wait", wait_seconds=240)
        stream = Stream(server, tokens=300)
        pushed = pool.submit(client.commit, id)
        while not pushed.done() and stream.running:
            # asked while the commit waits: never served by the old weights after the new ones were
            spans = complete(server, "1+1=", 2)["choices"][0]["weight_versions"]
            assert [span["version"] for span in spans] in (["early"], ["late"])
        assert pushed.result().result["version"] == "late"
        stream.wait()
        assert (stream.finish, len(stream.token_ids), _versions(stream)) == ("length", 300, ["early"])
        assert complete(server, "1+1=", 2)["choices"][0]["weight_versions"][0]["version"] == "late"


@FIRST
def test_waiting_has_a_deadline(server: Server):
    def attempt() -> bool:
        id = _prepared(client, LATE, running="wait", wait_seconds=0.2)
        stream = Stream(server, tokens=400)
        refused = _refusal(lambda: client.commit(id))
        if refused is None:
            stream.wait()
            assert stream.came_too_early
            on_early(server)
            return False
        assert (refused.kind, refused.status) == ("wait-timeout", 409)
        assert client.update(id).state == "prepared"
        assert complete(server, "1+1=", 2)["choices"][0]["weight_versions"][0]["version"] == "early"
        stream.wait()
        assert (stream.finish, _versions(stream)) == ("length", ["early"])
        assert client.commit(id).state == "committed"
        return True

    with server.client() as client:
        assert any(attempt() for _ in range(ATTEMPTS))


def test_abandoning_an_update_ends_its_wait(single: Server):
    def attempt() -> bool:
        id = _prepared(client, LATE, running="wait", wait_seconds=60)
        stream = Stream(single, tokens=400)
        commit = pool.submit(other.commit, id)
        refused = _refusal(lambda: client.abandon(id))
        if refused is not None:
            assert refused.kind == "wrong-state"
            stream.wait()
            assert stream.came_too_early
            on_early(single)
            return False
        with pytest.raises(UpdateError, match="abandoned"):
            commit.result()
        assert complete(single, "1+1=", 2)["choices"][0]["weight_versions"][0]["version"] == "early"
        stream.wait()
        assert (stream.finish, _versions(stream)) == ("length", ["early"])
        return True

    with single.client() as client, single.client() as other, ThreadPoolExecutor(1) as pool:
        assert any(attempt() for _ in range(ATTEMPTS))


def _aborted(server: Server, change: Callable[[], Any]) -> bool:
    """Whether a change that ends running requests met one; else that had ended by itself."""
    stream = Stream(server, tokens=1900)
    change()
    stream.wait()
    if stream.came_too_early:
        return False
    assert stream.finish == "abort"
    assert 0 < len(stream.token_ids) < 1900
    return True


@FIRST
def test_aborting_ends_running_requests_with_what_they_have(server: Server):
    def by_commit() -> bool:
        on_early(server)
        id = _prepared(client, LATE, running="abort")
        return _aborted(server, lambda: client.commit(id))

    def by_rollback() -> bool:
        epoch = client.weights().epoch
        met = _aborted(server, lambda: client.rollback("abort"))
        assert client.weights().epoch == epoch + 1
        return met

    with server.client() as client:
        assert any(by_commit() for _ in range(ATTEMPTS))
        assert complete(server, "1+1=", 2)["choices"][0]["weight_versions"][0]["version"] == "late"
        assert any(by_rollback() for _ in range(ATTEMPTS))


def test_what_metrics_tell(single: Server):
    def told() -> list[float]:
        outcomes = metrics(single, "fp8ext:updates_total")
        names = ("committed", "rolled-back", "abandoned")
        return [outcomes[f'outcome="{name}"'] for name in names] + [
            metrics(single, "fp8ext:epoch")[""],
            metrics(single, "fp8ext:stall_seconds_count")[""],
        ]

    def wait_for(expected: list[float]) -> None:
        """The server looks at its engine after each commit, and every five seconds."""
        until = time.monotonic() + 30
        while told() != expected and time.monotonic() < until:
            time.sleep(0.1)
        assert told() == expected

    def stalled() -> list[float]:
        """What was told before a commit that met a running request."""
        for _ in range(ATTEMPTS):
            on_early(single)
            time.sleep(5.5)
            before = told()
            id = _prepared(client, LATE)
            stream = Stream(single, tokens=400)
            client.commit(id)
            stream.wait()
            if not stream.came_too_early:
                return before
        pytest.fail("no commit met a running request")

    with single.client() as client:
        compiled = metrics(single, "fp8ext:compiled_total")
        assert set(compiled) == {f'compiler="{name}"' for name in ("nvrtc", "triton", "deep_gemm", "torch")}
        before = stalled()
        client.rollback()
        client.abandon(client.open().id)
        wait_for([before[0] + 1, before[1] + 1, before[2] + 1, before[3] + 2, before[4] + 1])
        assert client.weights().stall_seconds is None
        assert metrics(single, "fp8ext:compiled_total") == compiled
        with pytest.raises(UpdateError, match="no update"):
            client.update("unknown")
        assert metrics(single, "fp8ext:refusals_total")['kind="unknown-update"'] >= 1
        assert metrics(single, "fp8ext:phase_seconds_count")['phase="exchange"'] >= 2
        error = metrics(single, "fp8ext:quantization_error")
        assert 0.02 < error['statistic="mean"'] <= error['statistic="max"'] < 0.04
        assert metrics(single, "fp8ext:update_bytes_total")[""] > 0

# SPDX-License-Identifier: Apache-2.0
"""What goes on beside a route's own work, against an engine that notes what it is asked."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_answers import engine_status, update_state
from prometheus_client import CollectorRegistry

from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.serve import announced_chunks, commits, schema
from vllm_fp8ext.serve import backend as backend_module
from vllm_fp8ext.serve.allowed_dirs import AllowedDirs
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.schema import Rollback
from vllm_fp8ext.serve.spool import Spool
from vllm_fp8ext.serve.work import outcome, run_to_end
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.results import JobStarted, Lifetime, ServedManifest
from vllm_fp8ext.update.transports import nccl
from vllm_fp8ext.update.transports.nccl.message import MARK_BYTES


class Engine:
    """`answers`: what it says in turn, the last one again and again."""

    def __init__(self, *answers: Any) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.poisoned: str | None = None
        self._answers = list(answers)

    async def leave(self) -> None:
        self.asked.append(("leave", {}))

    async def __call__(self, operation: str, **arguments: Any) -> Any:
        self.asked.append((operation, arguments))
        result = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(result, Exception):
            raise result
        return result


def backend_of(engine: Engine) -> Backend:
    backend = Backend(CollectorRegistry())
    backend.engine = engine  # type: ignore[assignment]
    return backend


def test_an_update_is_asked_about_as_long_as_something_is_on_its_way() -> None:
    """So that it does not expire, however long a body takes."""
    engine = Engine(Lifetime(seconds=0.04))

    async def main() -> None:
        async with backend_of(engine).keep_update_open("u"):
            assert engine.asked == [("check", {"id": "u"})]
            while len(engine.asked) < 4:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        count = len(engine.asked)
        await asyncio.sleep(0.05)
        assert len(engine.asked) == count

    asyncio.run(asyncio.wait_for(main(), 20))
    assert {operation for operation, _ in engine.asked} == {"check"}


def test_nothing_is_on_its_way_to_an_update_that_has_ended() -> None:
    """Its room is for others, however slowly it comes."""
    ended = UpdateError("wrong-state", "it is abandoned", status=409)
    engine = Engine(Lifetime(seconds=0.02), ended)

    async def main() -> None:
        with pytest.raises(UpdateError, match="it is abandoned"):
            async with backend_of(engine).keep_update_open("u"):
                await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        with pytest.raises(UpdateError):
            async with backend_of(Engine(ended)).keep_update_open("u"):
                raise AssertionError("it was refused")

    asyncio.run(asyncio.wait_for(main(), 20))
    assert len(engine.asked) == 2


@pytest.mark.parametrize("other", [None, "another"])
def test_what_is_on_its_way_to_an_update_ends_with_it(
    other: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as this server hears of it, however long an update lives: others wait for its room."""

    class Updating(Engine):
        async def __call__(self, operation: str, **arguments: Any) -> Any:
            self.asked.append((operation, arguments))
            if operation == "status":
                return engine_status(update=self.updating)
            if operation == "check" and self.updating != arguments["id"]:
                raise UpdateError("wrong-state", "it is abandoned")
            return Lifetime(seconds=1e6)

        updating: str | None = "u"

    engine = Updating()
    backend = backend_of(engine)
    monkeypatch.setattr(backend.metrics, "observe", lambda status: None)

    async def main() -> None:
        async def come() -> None:
            async with backend.keep_update_open("u"):
                await asyncio.Event().wait()

        coming = asyncio.create_task(come())
        await backend.refresh_status()
        await asyncio.sleep(0.01)
        await backend.refresh_status()
        assert not coming.done()
        assert [operation for operation, _ in engine.asked].count("check") == 1
        engine.updating = other
        await backend.abandon("u")
        with pytest.raises(UpdateError, match="it is abandoned"):
            await coming
        assert backend._coming == []

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_is_on_its_way_comes_on_while_the_engine_is_busy() -> None:
    busy = UpdateError("engine-timeout", "no answer", status=504)
    engine = Engine(Lifetime(seconds=0.02), busy)

    async def main() -> None:
        async with backend_of(engine).keep_update_open("u"):
            while len(engine.asked) < 4:
                await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_is_on_its_way_can_be_cancelled_by_others() -> None:
    async def main() -> None:
        async def wait() -> None:
            async with backend_of(Engine(Lifetime(seconds=100.0))).keep_update_open("u"):
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("updating", ["u", None])
def test_what_is_open_is_abandoned(updating: str | None) -> None:
    engine = Engine(engine_status(update=updating))
    asyncio.run(backend_of(engine).abandon_open())
    abandoned = [("abandon", {"id": "u"})] if updating else []
    assert engine.asked == [("leave", {}), ("status", {}), *abandoned]


def test_who_loads_in_vain_is_told_when_the_guard_knows(tmp_path: Path) -> None:
    """In place, what could not be read to its end has left what nobody knows."""
    engine = Committing(update_state())
    engine.poisoned = "half of it"
    backend = backend_of(engine)
    backend.allowed_dirs = AllowedDirs([str(tmp_path)])
    body = schema.Load(path=str(tmp_path))
    with pytest.raises(UpdateError, match="expected"):
        asyncio.run(commits.load(backend, body))
    assert backend.poisoned == "half of it"
    assert [operation for operation, _ in engine.asked] == ["open", "abandon"]


def test_a_broadcast_is_polled_to_its_end() -> None:
    slow, backend = UpdateError("engine-timeout", "nothing was done"), backend_of(Engine({}))
    answers: list[Any] = [slow, slow, {}]

    async def wait_for_job(operation: str, started: Any) -> Any:
        result = answers.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    backend.engine.wait_for_job = wait_for_job  # type: ignore[method-assign]
    asyncio.run(announced_chunks.poll_to_end(backend, JobStarted(job=1)))
    assert answers == []


class Committing(Engine):
    """A commit has this outcome; what the engine says of itself takes a while."""

    async def call_until_drained(self, operation: str, **arguments: Any) -> Any:
        return await self(operation, **arguments)

    async def __call__(self, operation: str, **arguments: Any) -> Any:
        if operation == "status":
            await asyncio.sleep(0.05)
            return engine_status(poisoned=self.poisoned)
        return await super().__call__(operation, **arguments)


@pytest.mark.parametrize("refused", [False, True])
def test_a_commit_that_is_asked_for_again_is_the_one_that_goes_on(refused: bool) -> None:
    engine = Committing(
        UpdateError("wait-timeout", "still running") if refused else update_state(state="committed")
    )
    backend = backend_of(engine)

    async def main() -> list[Any]:
        asked = [outcome(run_to_end(commits.commit_once(backend, "u"))) for _ in range(2)]
        both = await asyncio.gather(*asked)
        assert [operation for operation, _ in engine.asked].count("commit") == 1
        assert await outcome(run_to_end(commits.commit_once(backend, "u"))) == both[0]
        assert [operation for operation, _ in engine.asked].count("commit") == 2
        return both

    first, second = asyncio.run(asyncio.wait_for(main(), 20))
    assert first is second or first == second
    assert isinstance(first, UpdateError) == refused
    assert not backend.commits


@pytest.mark.parametrize("before", [None, "a fault"])
@pytest.mark.parametrize("after", [None, "a fault"])
@pytest.mark.parametrize("operation", ["commit", "rollback"])
def test_the_guard_knows_before_anybody_is_told(
    operation: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Committing(
        UpdateError("poisoned", "it failed", status=503) if after else update_state(state="committed")
    )
    engine.poisoned = after
    backend = backend_of(engine)
    backend.poisoned = before
    monkeypatch.setattr(backend.metrics, "observe", lambda status: None)

    async def told() -> str | None:
        call = (
            commits.commit(backend, "u") if operation == "commit" else commits.rollback(backend, Rollback())
        )
        error = await outcome(call)
        assert isinstance(error, UpdateError) == bool(after)
        return backend.poisoned

    assert asyncio.run(told()) == after


class Ends:
    """An engine's calls, of which nothing is asked."""

    def __init__(self, *_: Any) -> None:
        self.end = SimpleNamespace(close=lambda: None)


def test_only_routes_need_room_for_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "EngineCalls", Ends)
    settings = {"fp8ext": {"spool_dir": "/no/such/folder"}}
    config = SimpleNamespace(additional_config=settings, model_config=SimpleNamespace(quantization="fp8"))
    client = SimpleNamespace(vllm_config=config)
    Backend(CollectorRegistry()).connect(client, routes=False)
    with pytest.raises(ConfigError, match="spool_dir: expected a folder, found none at /no/such/folder"):
        Backend(CollectorRegistry()).connect(client)


def test_a_bucket_may_be_the_largest_tensor_in_any_form(tmp_path: Path) -> None:
    """Fused experts in fp32 are larger than anything in the checkpoint; to that size no bucket is filled."""
    names = [
        f"layers.0.mlp.experts.{expert}.{name}_proj.weight" for expert in range(4) for name in ("gate", "up")
    ]
    specs = {name: TensorSpec(name, (64, 32), "bfloat16") for name in names}
    backend = backend_of(
        Engine(ServedManifest(manifest=Manifest(specs, frozenset(), {}, "fp32", 1).as_dict()))
    )
    backend.spool, backend.receive_bytes, backend.receive_seconds = (
        Spool(str(tmp_path), 1 << 20),
        1 << 12,
        1.0,
    )
    try:
        asyncio.run(backend.require_room())
    finally:
        backend.spool.close()
        backend.bodies.close()
    assert backend.receive_bytes == 2 * 64 * 32 + MARK_BYTES
    largest = 4 * 8 * 64 * 32 + MARK_BYTES
    group = schema.BroadcastGroup(backend="gloo", id="host:1/name", size=2, first_rank=2)
    tensor = schema.DenseTensor(name=names[0], dtype="float32", shape=[64, 32], offset=0)
    route = nccl.TRANSPORT.route
    assert route is not None
    sizes = {largest: "has no ranks 2 to 2", largest + 1: f"a bucket may have {largest} bytes"}
    for size, said in sizes.items():  # what is looked at next is the group
        body = schema.Receive(n=0, group=group, bytes=size, mark="00" * 8, tensors=[tensor])
        chunk = announced_chunks.AnnouncedChunk(backend, "u", body.model_dump())
        with pytest.raises(UpdateError, match=said):
            asyncio.run(chunk.begin_to_stage(route))


def test_the_manifest_is_asked_for_once() -> None:
    """Its body costs the engine's thread a walk over every tensor."""
    specs = {name: TensorSpec(name, (64, 32), "bfloat16") for name in ("a", "ü")}
    manifest = Manifest(specs, frozenset(), {}, "fp32", 1).as_dict()
    engine = Engine(ServedManifest(manifest=manifest))
    backend = backend_of(engine)

    async def ask() -> list[bytes]:
        return [await backend.manifest_body() for _ in range(3)]

    bodies = asyncio.run(ask())
    assert engine.asked == [("manifest", {})]
    assert {json.dumps(json.loads(body)) for body in bodies} == {json.dumps(manifest)}


def test_a_server_that_takes_no_updates_has_no_manifest_to_keep() -> None:
    refused = UpdateError("updates-unavailable", "it was started with staging none")
    backend = backend_of(Engine(refused, ServedManifest(manifest={})))

    async def ask() -> bytes:
        with pytest.raises(UpdateError, match="staging none"):
            await backend.manifest_body()
        return await backend.manifest_body()

    assert asyncio.run(ask()) == b"{}"


class Changing(Engine):
    """`changes`: what it tells of, until it ends."""

    def __init__(self, *changes: dict[str, Any]) -> None:
        super().__init__(engine_status(poisoned="a fault", update="other"))
        self.known: list[Any] = []
        self._changes = list(changes)

    async def changed(self, known: Any) -> Any:
        self.known.append(known)
        if not self._changes:
            raise UpdateError("engine-dead", "it has ended")
        return self._changes.pop(0)


def test_what_another_process_changed_is_acted_upon_at_once() -> None:
    """What is on its way to an update that has ended is looked at, and the poison guard knows."""
    change = {"epoch": 1, "poisoned": "a fault", "update": "other"}
    engine = Changing(change)
    backend = backend_of(engine)
    gone = asyncio.Event()
    backend._coming.append(("u", gone))
    asyncio.run(asyncio.wait_for(backend.keep_following(), 20))
    assert engine.known == [None, change]
    assert backend.poisoned == "a fault"
    assert gone.is_set()

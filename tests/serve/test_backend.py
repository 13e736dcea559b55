# SPDX-License-Identifier: Apache-2.0
"""What goes on beside a route's own work, against an engine that notes what it is asked."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import routes
from vllm_fp8ext.serve.backend import Backend


class Engine:
    """`answers`: what it says in turn, the last one again and again."""

    def __init__(self, *answers: Any) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._answers = list(answers)

    async def __call__(self, operation: str, **arguments: Any) -> Any:
        self.asked.append((operation, arguments))
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(found, Exception):
            raise found
        return found


def backend_of(engine: Engine) -> Backend:
    backend = Backend(CollectorRegistry())
    backend.engine = engine  # type: ignore[assignment]
    return backend


def test_an_update_is_asked_about_as_long_as_something_is_on_its_way() -> None:
    """So that it does not expire, however long a body takes."""
    engine = Engine({"lifetime": 0.04})

    async def main() -> None:
        async with backend_of(engine).kept_open("u"):
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
    ended = UpdateError("wrong-state", "it is abandoned")
    engine = Engine({"lifetime": 0.02}, ended)

    async def main() -> None:
        async with backend_of(engine).kept_open("u"):  # what it brings is refused later
            await asyncio.sleep(0.05)
        with pytest.raises(UpdateError):
            async with backend_of(Engine(ended)).kept_open("u"):
                raise AssertionError("it was refused")

    asyncio.run(main())
    assert len(engine.asked) == 2


@pytest.mark.parametrize("updating", ["u", None])
def test_what_is_open_is_abandoned(updating: str | None) -> None:
    engine = Engine({"update": updating})
    asyncio.run(backend_of(engine).abandon_open())
    assert engine.asked[1:] == ([("abandon", {"id": "u"})] if updating else [])


def test_a_file_that_is_gone_when_its_turn_comes(tmp_path: Path) -> None:
    with pytest.raises(UpdateError, match="model-2") as refused:
        asyncio.run(routes._begin_file(backend_of(Engine({})), "u", tmp_path / "model-2.safetensors"))
    assert (refused.value.kind, refused.value.status) == ("not-found", 404)

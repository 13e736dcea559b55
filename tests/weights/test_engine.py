# SPDX-License-Identifier: Apache-2.0
"""What the update engine refuses before it asks a rank."""

from typing import Any

import pytest

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.weights.engine import UpdateEngine
from vllm_fp8ext.weights.manifest import Manifest, TensorSpec
from vllm_fp8ext.weights.session import Running, Session, State

SPEC = TensorSpec("w", (2,), "bfloat16")


class IdleCore:
    """A `Core` that stands still, whose ranks must not be asked."""

    settings = Settings()
    quantization = "blockfp8"
    kv_cache_dtype = "auto"
    vocabulary = longest_prompt = 100

    def __init__(self) -> None:
        self.sleeps = False

    def asleep(self) -> bool:
        return self.sleeps

    def paused(self) -> bool:
        return False

    def unfinished(self) -> int:
        return 0

    def ranks(self, method: str, *_: Any) -> list[dict[str, Any]]:
        raise AssertionError(method)


@pytest.fixture
def core() -> IdleCore:
    return IdleCore()


@pytest.fixture
def engine(core: IdleCore) -> UpdateEngine:
    return UpdateEngine(core)  # type: ignore[arg-type]  # the rest is not asked for


def opened(engine: UpdateEngine, **more: Any) -> Session:
    manifest = Manifest({"w": SPEC}, frozenset(), {"w": ()}, "fp32", 1)
    session = Session("u", "v", Running.KEEP, manifest, engine._clock(), 1e6, **more)
    engine.sessions["u"] = session
    return session


CALLS = [
    ("stage", {"chunk": "0", "source": {}, "tensors": [["w", [2], "bfloat16", 0, 4]], "size": 4}),
    ("prepare", {}),
    ("commit", {}),
]


@pytest.mark.parametrize(("operation", "arguments"), CALLS)
def test_a_partial_update_that_was_open_before_does_not_heal(
    engine: UpdateEngine, operation: str, arguments: dict[str, Any]
) -> None:
    session = opened(engine, partial=True, base_epoch=0)
    if operation == "commit":
        session.state = State.PREPARED
    engine.step.poisoned = "half of it"
    result = engine.handle(operation, {"id": "u", **arguments})
    assert result["error"]["kind"] == "poisoned"


@pytest.mark.parametrize(
    "operation", ["open", "check", "stage", "prepare", "commit", "rollback", "digests", "verify"]
)
def test_nothing_that_needs_the_weights_is_done_while_they_are_asleep(
    engine: UpdateEngine, core: IdleCore, operation: str
) -> None:
    core.sleeps = True
    assert engine.handle(operation, {})["error"]["kind"] == "asleep"


def test_memory_is_not_given_back_while_a_part_was_overwritten(engine: UpdateEngine) -> None:
    engine.before_sleep(1)
    engine.step._held = 0.0
    with pytest.raises(UpdateError, match="in place"):
        engine.before_sleep(1)
    assert engine.handle("may_sleep", {})["error"]["kind"] == "update-open"

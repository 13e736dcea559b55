# SPDX-License-Identifier: Apache-2.0
"""Sessions in each of their states, for tests."""

from collections.abc import Callable, Iterable, Mapping

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.canary import CanarySpec
from vllm_fp8ext.update.contract.claims import Claim
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.engine.session import Running, Session
from vllm_fp8ext.update.engine.timestamp import Moment

NAMES = ("a", "b", "c", "d")
OPENED = Moment(50.0, 1000.0)
LIFETIME = 60.0
CANARY = CanarySpec([[1]], built_in=True)
MANIFEST = Manifest(
    {name: TensorSpec(name, (4, 2), "bfloat16") for name in NAMES}, frozenset({"tied"}), {}, "fp32", 1
)


def specs(names: Iterable[str]) -> list[TensorSpec]:
    return [TensorSpec(name, (4, 2), "bfloat16") for name in names]


def opened(base_epoch: int | None = None, claims: Mapping[str, Claim] | None = None) -> Session:
    return Session(
        "u1",
        "step-9",
        Running.KEEP,
        MANIFEST,
        OPENED,
        LIFETIME,
        CANARY,
        base_epoch=base_epoch,
        claims=claims or {},
    )


def send(session: Session, key: str, names: Iterable[str], size: int = 10) -> None:
    session.receive(key, specs(names), size)
    session.staged(key, [])


def prepare(session: Session, epoch: int = 0) -> None:
    session.check(epoch)
    session.prepared(session.revision)


def prepared() -> Session:
    session = opened()
    send(session, "0", NAMES)
    prepare(session)
    return session


def committing() -> Session:
    session = prepared()
    session.exchanged()
    return session


def committed() -> Session:
    session = committing()
    session.commit({"epoch": 1})
    return session


def abandoned() -> Session:
    session = opened()
    session.abandon()
    return session


def expired() -> Session:
    session = opened()
    assert session.expire(OPENED.later(LIFETIME))
    return session


def refused(call: Callable[[], object]) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        call()
    return caught.value


ENDED = {committed: ("wrong-state", 409), abandoned: ("wrong-state", 409), expired: ("expired", 410)}
ended = pytest.mark.parametrize("make", ENDED, ids=lambda make: make.__name__)

# SPDX-License-Identifier: Apache-2.0
"""Results cross the process boundary as they are, and are what the routes' schemas say."""

from dataclasses import fields

import msgspec
import pytest
from engine_answers import engine_status, update_state
from pydantic import BaseModel

from vllm_fp8ext.errors import Failure
from vllm_fp8ext.serve import schema
from vllm_fp8ext.update.contract.results import (
    KINDS,
    Done,
    EngineStatus,
    JobStarted,
    Result,
    RolledBack,
    ServedDigests,
    ServedScales,
    UpdateState,
    VerifiedWeights,
    Waiting,
    decode,
    encode,
)


@pytest.mark.parametrize(
    "result",
    [
        Done(),
        JobStarted(job=3, soonest=0.5),
        Waiting(requests=2),
        Failure(kind="incomplete", message="lacks w", status=422, details={"missing": ["w"]}),
        update_state(chunks={"0": {"staged": True}}, seconds={"prepare": 0.25}),
        engine_status(compiled=[{"triton": 1}]),
    ],
    ids=lambda result: type(result).__name__,
)
def test_a_result_arrives_as_it_was(result: Result) -> None:
    """By the bytes that vLLM makes of it."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(encode(result, "half of it")))
    assert decode(sent) == (result, "half of it")


OF_THE_SERVER = {"max_receive_bytes"}
"""Fields of the schema that the API server adds."""
FOR_METRICS = {"kv_layers", "kv_traffic", "totals"}
"""Fields of the result that no body shows."""


@pytest.mark.parametrize(
    ("result", "body", "added", "hidden"),
    [
        (UpdateState, schema.Update, OF_THE_SERVER, set()),
        (EngineStatus, schema.Weights, {"features"}, FOR_METRICS),
        (ServedScales, schema.KvScalesServed, set(), set()),
        (ServedDigests, schema.Digests, set(), set()),
        (VerifiedWeights, schema.Verified, set(), set()),
        (RolledBack, schema.Committed, set(), set()),
    ],
)
def test_bodies_have_the_fields_of_results(
    result: type[Result], body: type[BaseModel], added: set[str], hidden: set[str]
) -> None:
    assert {each.name for each in fields(result)} - hidden == body.model_fields.keys() - added


def test_every_kind_has_a_name_of_its_own() -> None:
    assert len(KINDS) == len(set(KINDS.values())) == 16

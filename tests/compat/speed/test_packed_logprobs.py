# SPDX-License-Identifier: Apache-2.0
"""Logprobs of a message's requests that travel in three arrays."""

import asyncio
import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core_client import AsyncMPClient, SyncMPClient
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_fp8ext.compat.speed import packed_logprobs
from vllm_fp8ext.compat.speed.packed_logprobs import pack, unpack


def output(name: str, positions: int | None, width: int = 1) -> EngineCoreOutput:
    lists = None
    if positions is not None:
        values = np.random.default_rng(len(name)).random((positions, width), dtype=np.float32)
        ids = np.arange(positions * width, dtype=np.int32).reshape(positions, width) + ord(name[0])
        lists = LogprobsLists(ids, values, np.arange(positions, dtype=np.int64), None)
    return EngineCoreOutput(name, list(range(positions or 1)), new_logprobs=lists)


def told(outputs: list[EngineCoreOutput]) -> list[Any]:
    """Return the contents of outputs, to compare."""
    return [
        (each.request_id, lists and [np.asarray(part).tolist() for part in lists[:3]])
        for each in outputs
        for lists in [each.new_logprobs]
    ]


MIXES = {
    "all alike": [("a", 1, 1), ("b", 1, 1), ("c", 1, 1)],
    "several positions": [("a", 16, 1), ("b", 1, 1), ("c", 3, 1)],
    "some ask for none": [("a", None, 1), ("b", 1, 1), ("c", None, 1), ("d", 2, 1)],
    "other widths": [("a", 1, 3), ("b", 4, 1), ("c", 2, 3)],
    "one": [("a", 2, 6)],
    "none": [("a", None, 1)],
    "empty": [],
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_what_was_packed_and_sent_is_unpacked(mix: list[tuple[str, int | None, int]]) -> None:
    expected = told([output(*each) for each in mix])
    outputs = [output(*each) for each in mix]
    pack(outputs)
    message = EngineCoreOutputs(outputs=outputs)
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(message))
    unpack(received.outputs)
    assert told(received.outputs) == expected


def test_a_message_of_one_width_holds_three_arrays() -> None:
    outputs = [output(name, 1) for name in "abcdefgh"]
    pack(outputs)
    assert [each.new_logprobs is not None for each in outputs] == [True] + [False] * 7


def test_what_was_not_packed_stays() -> None:
    outputs = [output("a", 1), output("b", 2, 3)]
    expected = told(outputs)
    unpack(outputs)
    assert told(outputs) == expected


def test_both_clients_of_an_engine_core_unpack() -> None:
    packed_logprobs.install()
    expected = told([output("a", 2), output("b", 1)])
    for client in (SyncMPClient, AsyncMPClient):
        outputs = [output("a", 2), output("b", 1)]
        pack(outputs)
        waiting: Any = queue.Queue() if client is SyncMPClient else asyncio.Queue()
        waiting.put_nowait(EngineCoreOutputs(outputs=outputs))
        of_client = SimpleNamespace(outputs_queue=waiting, _ensure_output_queue_task=lambda: None)
        if client is SyncMPClient:
            received = SyncMPClient.get_output(of_client)
        else:
            received = asyncio.run(AsyncMPClient.get_output_async(of_client))
        assert told(received.outputs) == expected

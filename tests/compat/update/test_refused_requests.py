# SPDX-License-Identifier: Apache-2.0
"""Requests that an engine in its caller's process refuses."""

from types import SimpleNamespace

from vllm.v1.engine import FinishReason

from vllm_fp8ext.compat.update.refused_requests import RefusedRequests


def test_refused_requests_are_the_output_of_the_next_step() -> None:
    core = SimpleNamespace(step_fn=lambda: ({}, True))
    refused = RefusedRequests(core)
    assert core.step_fn() == ({}, True)
    for id in ("a", "b"):
        refused.add(id)
    outputs, executed = core.step_fn()
    assert not executed
    assert [(each.request_id, each.finish_reason) for each in outputs[0].outputs] == [
        ("a", FinishReason.ERROR),
        ("b", FinishReason.ERROR),
    ]
    assert outputs[0].finished_requests == {"a", "b"}
    assert core.step_fn() == ({}, True)

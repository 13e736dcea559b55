# SPDX-License-Identifier: Apache-2.0
"""Ends requests with an error in an engine core that lives in its caller's process.

Such a core has no queue of outputs: what it has refused is the output of its next step.
"""

from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

FEATURE: str = "core"
WHY: str = "Refuse requests of an engine in this process: vLLM's loop waits for the outputs of every request."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.engine.core:EngineCore.step_fn",)
USES: dict[str, tuple[str, ...]] = {
    "end requests with an error in this process": (
        "vllm.v1.engine:EngineCoreOutput(request_id, new_token_ids, finish_reason)",
        "vllm.v1.engine:EngineCoreOutputs(outputs, finished_requests)",
        "vllm.v1.engine:FinishReason.ERROR",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's core in its caller's process can end a request with an error"


class RefusedRequests:
    """Requests that one core has refused since its last step."""

    def __init__(self, core: Any) -> None:
        self._ids: list[str] = []
        step = core.step_fn

        def step_fn() -> Any:
            if not self._ids:
                return step()
            ids, self._ids = self._ids, []
            outputs = [
                EngineCoreOutput(request_id=id, new_token_ids=[], finish_reason=FinishReason.ERROR)
                for id in ids
            ]
            return {0: EngineCoreOutputs(outputs=outputs, finished_requests=set(ids))}, False

        core.step_fn = step_fn

    def add(self, id: str) -> None:
        """End a request with the next step."""
        self._ids.append(id)

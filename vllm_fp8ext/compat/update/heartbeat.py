# SPDX-License-Identifier: Apache-2.0
"""Answers whether an engine core's process runs at all, however long a step takes.

The core's thread for input answers, before it hands a call on.
"""

from typing import Any

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType, UtilityOutput, UtilityResult

from vllm_fp8ext.compat.update.engine_shutdown import replace

FEATURE: str = "core"
WHY: str = (
    "Tell an engine that is frozen from one that is busy: vLLM's core answers no call while "
    "its main thread is in a step."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.engine.core:EngineCoreProc.input_queue",)
USES: dict[str, tuple[str, ...]] = {
    "tell an engine that is frozen from one that is busy": (
        "vllm.v1.engine.core:EngineCoreProc.process_input_sockets",
        "vllm.v1.engine:UtilityOutput(call_id, result)",
        "vllm.v1.engine:EngineCoreOutputs(utility_output)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's engine core answers a call while its main thread is in a step"

PULSE = "pulse"
"""The operation, beside those of the update engine."""


def answer_pulse(core: Any) -> None:
    """Have a core answer `PULSE`, if it takes calls from another process."""
    if not hasattr(core, "input_queue"):
        return
    put, outputs = core.input_queue.put_nowait, core.output_queue

    def take(item: Any) -> None:
        kind, request = item
        if kind is EngineCoreRequestType.UTILITY:
            client, call, method, arguments = request
            if method == "fp8ext" and arguments[0] == PULSE:
                answer = UtilityOutput(call, result=UtilityResult(None))
                outputs.put_nowait((client, EngineCoreOutputs(utility_output=answer)))
                return
        put(item)

    replace(core.input_queue, "put_nowait", take)

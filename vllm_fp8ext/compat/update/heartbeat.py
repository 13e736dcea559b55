# SPDX-License-Identifier: Apache-2.0
"""Whether the process of an engine core runs at all: a call that its thread for input answers, however long a step takes.

Replaces, on an instance, `input_queue.put_nowait`, through which that thread hands on what comes. Can go once vLLM's engine
core answers a call while its main thread is in a step.
"""

from typing import Any

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType, UtilityOutput, UtilityResult

from vllm_fp8ext.compat.update.engine_shutdown import replace

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

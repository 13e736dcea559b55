# SPDX-License-Identifier: Apache-2.0
"""Says with a request's next token which older weights computed K and V of it.

Their labels travel beside the step's own (`update.contract.labels.Step`).
"""

from typing import Any

from vllm_fp8ext.compat.update.kv_epochs import KvEpochs
from vllm_fp8ext.compat.wrapping import wrap_instance
from vllm_fp8ext.update.contract.labels import Step

FEATURE: str = "weight_versions"
WHY: str = (
    "Say which weights computed the K and V of a request: vLLM has one label for all requests of a step."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.engine.core:EngineCore._attach_weight_version(outputs)",)
USES: dict[str, tuple[str, ...]] = {
    "say which weights computed the K and V of a request": (
        "vllm.v1.engine:EngineCoreOutputs.weight_version",
    ),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/54443"
REMOVE_WHEN: str = "vLLM tells the weights of K and V"


def attach(core: Any, epochs: KvEpochs) -> None:
    """Have the steps of an engine core say so."""

    def wrapper(original: Any) -> Any:
        def attach_weight_version(outputs: dict[int, Any]) -> None:
            original(outputs)
            for each in outputs.values():
                held = epochs.labels_to_tell([one.request_id for one in each.outputs if one.new_token_ids])
                if held:
                    each.weight_version = Step(each.weight_version, held).encode()

        return attach_weight_version

    wrap_instance(core, "_attach_weight_version", wrapper)

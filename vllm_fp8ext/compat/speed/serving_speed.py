# SPDX-License-Identifier: Apache-2.0
"""Installs what makes answers faster in the process that an engine answers to. Replaces nothing by itself."""

import sys

from vllm_fp8ext.compat.speed import flat_logprobs, output_interval
from vllm_fp8ext.config import ServingSettings

_ROUTES = "vllm.entrypoints.openai.completion.serving"
"""Imported where there is an API server."""


def install(settings: ServingSettings) -> None:
    """Have this process make answers so. Idempotent."""
    output_interval.install()
    if settings.flat_logprobs:
        flat_logprobs.install()
        if _ROUTES in sys.modules:
            install_answers()


def install_answers() -> None:
    """Have the API server of this process make answers of flat logprobs, and write them fast. Idempotent."""
    from vllm_fp8ext.compat.speed import flat_answers, json_responses

    flat_answers.install()
    json_responses.install()

# SPDX-License-Identifier: Apache-2.0
"""Installs what makes answers faster in the process that an engine answers to."""

import sys

from vllm_fp8ext.compat.features import is_available
from vllm_fp8ext.compat.speed.collector import look_less_often
from vllm_fp8ext.config import ServingSettings

FEATURE: str = "core"
WHY: str = "Install what this process can use, and no more."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "`output_interval`, `flat_logprobs` and `json_responses` go"

_ROUTES = "vllm.entrypoints.openai.completion.serving"
"""Imported where there is an API server."""


def install(settings: ServingSettings) -> None:
    """Have this process make answers so. Idempotent."""
    if is_available("output_interval"):
        from vllm_fp8ext.compat.speed import (
            latency_histogram,
            merged_messages,
            output_interval,
            packed_logprobs,
        )

        output_interval.install()
        packed_logprobs.install()
        merged_messages.install()
        latency_histogram.install()
    if settings.flat_logprobs and is_available("flat_logprobs"):
        from vllm_fp8ext.compat.speed import flat_logprobs

        flat_logprobs.install()
        if _ROUTES in sys.modules:
            install_answers()


def install_answers() -> None:
    """Have the API server of this process make answers of flat logprobs, and write fast. Idempotent."""
    look_less_often()
    if is_available("flat_answers"):
        from vllm_fp8ext.compat.speed import flat_answers

        flat_answers.install()
    if is_available("json_responses"):
        from vllm_fp8ext.compat.speed import json_responses

        json_responses.install()

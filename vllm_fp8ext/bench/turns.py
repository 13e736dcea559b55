# SPDX-License-Identifier: Apache-2.0
"""One turn of an engine in a case: its requests all at once, or as many always in flight."""

from typing import TypeAlias

from vllm_fp8ext.bench.engines import Engine, EngineError

Case: TypeAlias = tuple[int, int, int]
"""Requests, tokens of their prompts and of their responses."""


def at_once(engine: Engine, case: Case, repeat: int) -> dict[str, float]:
    """Run one turn; turn 0 is the start of the case."""
    requests, tokens, output = case
    first = engine.seconds(requests, tokens, 1, 2 * repeat)
    length = output if repeat else min(output, 32)
    whole = engine.seconds(requests, tokens, length, 2 * repeat + 1)
    return {
        "tokens_per_s": requests * output / whole,
        "ms_per_step": (whole - first) / (output - 1) * 1e3,
        "first_token_ms": first * 1e3,
    }


def steady(engine: Engine, case: Case, seconds: float) -> dict[str, float]:
    """Run for so many seconds, with steps that mix prompts and decoding.

    Raises:
        EngineError: it gave no token in that time.
    """
    from vllm_fp8ext.bench.steady import SteadyLoad

    requests, tokens, output = case
    load = SteadyLoad(requests=requests, tokens=tokens, output=output, windows=1, seconds=seconds)
    (window,) = engine.steady(load)
    if not window.tokens:
        raise EngineError(f"{engine.name}: expected tokens within {window.seconds:.3f} s, found none")
    return {
        "tokens_per_s": window.rate,
        "ms_per_step": window.running / window.rate * 1e3,
        "running": window.running,
        "preemptions": window.preemptions,
    }

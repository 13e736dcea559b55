# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of whole engines on one GPU: BF16, stock `fp8_per_block` and `blockfp8`, in turn.

    fp8ext bench rollout --shape Qwen3-8B --kv fp8 --lend --kv-gib 37 --out rollout.json

All engines are alive at once and take turns, so that they see the same GPU. Where their KV caches do not fit beside each
other, the engine whose turn it is has the memory for them (--lend); where their weights do not, engines run one after the
other (--apart). Several --settings are as many engines of `blockfp8`. Weights are generated (or given,
--checkpoint); token ids go in and come out. Every engine first runs the start of a case unmeasured, and the linear layers of
`blockfp8` must then be within the bound of their reference, with as many tokens as the case gives them. The time to the first
tokens, measured in a run of its own, is taken off for the time of a decode step. With --steady, a case's requests are always
in flight, spread evenly over their responses, a new one for each that is done: steps mix prompts and decoding.
--drafts compares ways of speculative decoding: `ms_per_step` is that of a token then, and `tokens_per_step` tells how many a
step brought. --divergence also tells how far the distributions of engines with other --settings are from those of the first
(`kl`).
"""

import argparse
import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from vllm_fp8ext.bench import turns
from vllm_fp8ext.bench.divergence import divergences, prompts_of
from vllm_fp8ext.bench.engine_kinds import NOTHING, STEP, Kind, arguments, kinds, said, settings_of
from vllm_fp8ext.bench.engines import VARIANTS, Engine, EngineError, in_turn
from vllm_fp8ext.bench.generated import SHAPES, checkpoint
from vllm_fp8ext.bench.options import CommandLine, case_of
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.errors import ConfigError

CASES = ("1x1024x1024", "8x1024x1024", "8x512x256", "32x1024x1024", "128x1024x1024", "256x1024x1024")
console = Console(width=140, highlight=False)


Engines: TypeAlias = dict[Kind, Engine]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says; the exit code.

    Raises:
        ConfigError: no GPU, a case that is none, or profiles of engines that lend.
        EngineError: an engine ended, or its linear layers are not within their bound.
    """
    options = _parser().parse_args(arguments)
    if options.lend and options.profile:
        raise ConfigError(
            "--lend: expected no --profile, for which an engine runs in one process and can't lend memory (take --apart)"
        )
    if options.steady is not None and (not 0 < options.steady < math.inf or options.profile):
        raise ConfigError(f"--steady: expected more than 0 seconds and no --profile, found {options.steady}")
    drafts = options.drafts != [NOTHING]
    if options.steady is not None and (drafts or options.period):
        raise ConfigError("--steady: expected no --drafts and no --period")
    if options.period is not None and options.period < 1:
        raise ConfigError(f"--period: expected 1 token or more, found {options.period}")
    cases = [_case(text) for text in options.cases]
    if options.divergence:
        options.divergence = prompts_of(options.divergence, max(sum(case[1:]) for case in cases))
        if options.apart or options.profile:
            raise ConfigError(
                "--divergence: expected engines beside each other, without --apart and --profile"
            )
    stop = time.monotonic() + options.seconds
    before = json.loads(options.out.read_text()) if options.append and options.out.exists() else None
    origin = provenance()
    engines_of = kinds(options.variants, options.kv, options.settings, options.drafts)
    results: list[dict[str, Any]] = []
    with checkpoint(options.checkpoint, options.shape) as folder:
        alive = _apart if options.apart else _together
        with contextlib.closing(alive(engines_of, folder, options)) as groups:
            for engines in groups:
                far = divergences(engines, options.divergence) if options.divergence else {}
                for case in cases:
                    if options.profile:
                        results += _profile(options, case, engines)
                        write_cases(options.profile, origin, results)
                        continue
                    measured = _measure(options, case, engines, stop, results)
                    results += [
                        {**result, **far.get(kind, {})}
                        for kind, result in zip(engines, measured, strict=False)
                    ]
                    if results:  # as far as it came, whatever happens to the next
                        _write(options.out, before, origin, results)
    return 0


def _together(kinds: list[Kind], folder: Path, options: argparse.Namespace) -> Generator[Engines]:
    """Engines beside each other, all of them ready."""
    with contextlib.ExitStack() as stack:
        lends = None
        if options.lend:
            lends = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8ext-"))) / "memory"
        engines: Engines = {}
        for kind in kinds:
            arguments, profile = _arguments(kind, options), options.profile is not None
            engine = Engine(folder, str(kind), arguments, profile=profile, lends=lends, period=options.period)
            engines[kind] = stack.enter_context(contextlib.closing(engine))
        for engine in engines.values():
            console.print(f"{engine.name}: ready after {engine.wait():.0f} s")
        yield engines


def _apart(kinds: list[Kind], folder: Path, options: argparse.Namespace) -> Generator[Engines]:
    """One engine after the other."""
    profile = options.profile is not None
    made = (
        Engine(
            folder,
            str(kind),
            _arguments(kind, options),
            profile=profile,
            held=True,
            period=options.period,
        )
        for kind in kinds
    )
    with contextlib.closing(in_turn(made)) as engines:
        for kind, (engine, seconds) in zip(kinds, engines, strict=True):
            console.print(f"{engine.name}: ready after {seconds:.0f} s")
            yield {kind: engine}


def _parser() -> argparse.ArgumentParser:
    parser = CommandLine("rollout", __doc__)
    parser.add_engines(SHAPES, VARIANTS, CASES, "in turn")
    parser.add_choice("--kv", ("auto", "fp8"), ["auto"], "of the KV cache, engines of each", metavar="DTYPE")
    parser.add_argument(
        "--steady",
        type=float,
        metavar="SECONDS",
        help="of each turn, with requests that are followed by new ones",
    )
    parser.add_argument(
        "--divergence",
        metavar="PROMPTSxTOKENS",
        help="of random tokens: compare distributions of blockfp8 engines with the first one's",
    )
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--lend", action="store_true", help="K and V of one engine at a time")
    places.add_argument("--apart", action="store_true", help="one engine after the other")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each engine in each case")
    parser.add_argument("--kv-gib", type=float, default=24.0, help="KV cache of each engine")
    parser.add_argument(
        "--settings", type=settings_of, nargs="+", default=["{}"], help="more settings of blockfp8, as JSON"
    )
    parser.add_argument(
        "--drafts",
        type=settings_of,
        nargs="+",
        default=[NOTHING],
        help="of speculative decoding, engines of each, as JSON; {} for none",
    )
    parser.add_argument(
        "--period",
        type=int,
        metavar="TOKENS",
        help="after which each prompt repeats itself, as reasoning does",
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no repeat after so long")
    parser.add_argument(
        "--profile", type=Path, help="measure no speed: write what the GPU did in each case here, as JSON"
    )
    parser.add_argument("--append", action="store_true", help="keep the other cases that --out has")
    return parser


def _case(text: str) -> tuple[int, int, int]:
    return case_of(text, least_output=2)  # the first token is timed by itself


def _arguments(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    longest = max(sum(_case(text)[1:]) for text in options.cases)
    counts = {"disable_log_stats": False} if options.steady else {}  # preemptions
    return arguments(kind, longest, options.kv_gib, {**counts, **options.engine})


@dataclass
class _Turns:
    """Turns of one engine in a case."""

    samples: list[dict[str, float]] = field(default_factory=list)
    """Measurements of each turn but the first."""
    compiled: dict[str, int] = field(default_factory=dict)
    """Compilations before what is measured, by compiler."""
    errors: dict[str, float] = field(default_factory=dict)
    """Errors of linear layers, as parts of their bound."""
    accepted: int = 0
    """Drafted tokens that were accepted before what is measured."""


def _measure(
    options: argparse.Namespace,
    case: tuple[int, int, int],
    engines: Engines,
    stop: float,
    earlier: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """`earlier`: what other engines did in these cases."""
    requests, tokens, output = case
    results: list[dict[str, Any]] = []
    for kind, taken in _take_turns(options, case, engines, stop).items():
        if not taken.samples:
            console.print(f"{requests}x{tokens}x{output}: no time left")
            return []
        result = _result(options, case, kind, taken, engines)
        alike: dict[str, Any] = {"requests": requests, "input": tokens, "output": output}
        alike |= {"variant": "bf16", "kv_cache": kind.kv}
        base = next(
            (other["tokens_per_s"] for other in (*results, *earlier) if alike.items() <= other.items()), None
        )
        if kind.variant == "bf16" or base:
            result["ratio_bf16"] = result["tokens_per_s"] / (base or result["tokens_per_s"])
        speedup = f"{result['ratio_bf16']:5.2f}x" if "ratio_bf16" in result else ""
        results.append(result)
        first = f"{result['first_token_ms']:8.1f} ms to the first tokens " if not options.steady else ""
        console.print(
            f"{requests:4} x {tokens}/{output} {kind!s:24} {result['tokens_per_s']:9.0f} tok/s "
            f"{result['ms_per_step']:7.2f} ms/step {first}{speedup}"
        )
    return results


def _take_turns(
    options: argparse.Namespace, case: tuple[int, int, int], engines: Engines, stop: float
) -> dict[Kind, _Turns]:
    """Run a case on all engines in turn, again and again; the first turn of each is not measured."""
    requests, tokens, _ = case
    taken = {kind: _Turns() for kind in engines}
    for repeat in range(options.repeats + 1):
        if time.monotonic() > stop:
            break
        for kind, engine in engines.items():
            with engine.turn():
                if options.lend:  # the first to touch what was just taken
                    engine.seconds(1, tokens, 1, 2 * repeat)
                if options.steady:
                    took = turns.steady(engine, case, options.steady if repeat else 1.0)
                else:
                    took = turns.at_once(engine, case, repeat)
                if not repeat:
                    taken[kind].errors = engine.linear_errors((requests, min(requests * tokens, STEP)))
                    require_within(str(kind), taken[kind].errors)
            if repeat:
                taken[kind].samples.append(took)
            else:
                taken[kind].compiled = engine.compiled()
                if kind.drafts != NOTHING:
                    taken[kind].accepted = engine.accepted()
    return taken


def _result(
    options: argparse.Namespace, case: tuple[int, int, int], kind: Kind, taken: _Turns, engines: Engines
) -> dict[str, Any]:
    """Return one engine's medians in a case."""
    settings = json.loads(kind.settings)
    after = engines[kind].compiled()
    accepted = engines[kind].accepted() - taken.accepted if kind.drafts != NOTHING else None
    return {
        **said(options, case, kind),
        **({"period": options.period} if options.period else {}),
        **({} if accepted is None else {"tokens_per_step": tokens_per_step(case, taken, accepted)}),
        **({"load": "steady", "seconds": options.steady} if options.steady else {}),
        "staging": settings.get("staging", "shadow") if kind.variant == "blockfp8" else "none",
        **{name: statistics.median(turn[name] for turn in taken.samples) for name in taken.samples[0]},
        "samples": [turn["tokens_per_s"] for turn in taken.samples],
        "compiled_meanwhile": {
            compiler: after[compiler] - count for compiler, count in taken.compiled.items()
        },
        "error_of_bound": max(taken.errors.values(), default=None),
        "beside": sorted({other.variant for other in engines}),
    }


def tokens_per_step(case: tuple[int, int, int], taken: _Turns, accepted: int) -> float:
    """Return how many tokens a step brought each request in the measured turns.

    `accepted`: drafted ones among them.
    """
    requests, _, output = case
    generated = requests * (output + 1) * len(taken.samples)  # a turn's first tokens are timed by themselves
    return generated / (generated - accepted)


def require_within(engine: str, errors: dict[str, float]) -> None:
    """Raises `EngineError` where an error is not below its bound; `errors`: as parts of it, by layer."""
    if wrong := {layer: error for layer, error in errors.items() if not error < 1}:
        raise EngineError(
            f"{engine}: expected linear layers within their bound, found errors of {wrong} times it"
        )


def _write(
    file: Path | None, before: dict[str, Any] | None, origin: dict[str, Any], results: list[dict[str, Any]]
) -> None:
    """Provenance of each run beside its cases: a file may hold several runs."""
    before = before or {"provenance": origin, "cases": []}
    runs = [*before.get("runs", ()), origin]
    cases = [*before["cases"], *({**case, "run": len(runs) - 1} for case in results)]
    write_cases(file, before["provenance"], cases, runs=runs)


def _profile(
    options: argparse.Namespace, case: tuple[int, int, int], engines: Engines
) -> list[dict[str, Any]]:
    """Profile the GPU in a case, the second time it comes."""
    requests, tokens, output = case
    profiles = []
    for kind, engine in engines.items():
        engine.gpu_time(*case, 0)
        took = engine.gpu_time(*case, 1)
        profiles.append(
            {
                **said(options, case, kind),
                "milliseconds": took.milliseconds,
                "busy_milliseconds": took.busy,
                "kernels": [
                    {"name": name, "milliseconds": milliseconds, "launches": launches}
                    for name, milliseconds, launches in took.kernels
                ],
            }
        )
        console.print(
            f"{requests} x {tokens}/{output} {kind}: "
            f"GPU busy for {took.busy:.1f} of {took.milliseconds:.1f} ms"
        )
        for name, milliseconds, launches in took.kernels[:10]:
            each = milliseconds / launches * 1e3
            console.print(f"{milliseconds:9.2f} ms {launches:7} x {each:9.2f} us  {name[:90]}")
    return profiles

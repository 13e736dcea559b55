# SPDX-License-Identifier: Apache-2.0
"""Options of a load test. The same for locust's command line, its web page and `fp8ext bench load`."""

import os
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_fp8ext.environment import ADMIN_KEY, key_of
from vllm_fp8ext.loadtest.prompts import FIRST_TOKEN, Lengths, Shared
from vllm_fp8ext.loadtest.slo import Slo
from vllm_fp8ext.loadtest.stream import ENDPOINTS

PROFILES = ("closed", "poisson", "constant", "rollout")
RUNNING = ("keep", "recompute", "wait", "abort")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is made. Lengths, prefixes and SLOs as they were written."""

    profile: str = "closed"
    endpoint: str = "completions"
    model: str | None = None
    rate: float = 1.0
    prompts: int = 8
    samples: int = 4
    steps: int = 0
    one_step_off: bool = False
    input_tokens: str = "lognormal:400,1.0,4000"
    output_tokens: str = "lognormal:200,1.0,1000"
    shared_prefix: str | None = None
    vocabulary: int = 1000
    temperature: float = 1.0
    logprobs: int | None = 0
    timeout: float = 600.0
    seed: int = 0
    update_every: str | None = None
    checkpoints: tuple[str, ...] = ()
    update_through: str = "fp8ext"
    running: str = "keep"
    files: bool = False
    scrape_every: float = 1.0
    slos: tuple[str, ...] = ()
    report: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for the first option that is not valid."""
        _one_of("profile", self.profile, PROFILES)
        _one_of("endpoint", self.endpoint, tuple(ENDPOINTS))
        _one_of("update-through", self.update_through, ("fp8ext", "stock"))
        _one_of("running", self.running, RUNNING)
        if self.rate <= 0:
            raise ValueError(f"rate: expected more than 0 requests per second, found {self.rate:g}")
        if self.vocabulary <= FIRST_TOKEN:
            raise ValueError(
                f"vocabulary: expected more than {FIRST_TOKEN} token ids, found {self.vocabulary}"
            )
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs: expected 0 or more, or none, found {self.logprobs}")
        Lengths.parse(self.input_tokens)
        Lengths.parse(self.output_tokens)
        if self.shared_prefix:
            Shared.parse(self.shared_prefix)
        for text in self.slos:
            Slo.parse(text)
        if self.update_every is not None:
            self.update_seconds  # noqa: B018  parsed for its error
            if not self.checkpoints:
                raise ValueError(
                    f"--checkpoints: expected at least one for --update-every {self.update_every}, found none"
                )
        if self.update_every == "step" and self.profile != "rollout":
            raise ValueError("update-every step: only the profile rollout has steps")

    @property
    def update_seconds(self) -> float | None:
        """Seconds between updates; None with none, or one each step."""
        if self.update_every in (None, "", "step"):
            return None
        try:
            seconds = float(self.update_every or 0)
        except ValueError:
            seconds = 0.0
        if seconds <= 0:
            raise ValueError(f"update-every: expected seconds or 'step', found {self.update_every!r}")
        return seconds

    def pusher(self, url: str) -> dict[str, Any]:
        """For `weights.Pusher`, whose process may have another current folder."""
        ours = self.update_through == "fp8ext" and not self.files
        return {
            "through": self.update_through,
            "url": url,
            "key": key_of(os.environ.get(ADMIN_KEY)) or "",
            "checkpoints": [str(Path(path).absolute()) if ours else path for path in self.checkpoints],
            "running": self.running,
            "files": self.files,
        }

    def as_dict(self) -> dict[str, Any]:
        """For a report: nothing in here is secret."""
        return asdict(self)


def _one_of(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"{name}: expected one of {', '.join(valid)}, found {value!r}")


def add(parser: ArgumentParser) -> None:
    """Add every option to a parser. Locust's takes `include_in_web_ui` from `add_argument`, and shows all of them."""
    group = parser.add_argument_group("rollout traffic and weight updates (vllm-fp8ext)")
    # locust has a --profile of its own
    group.add_argument("--traffic", choices=PROFILES, default="closed", help="how requests come")
    group.add_argument("--endpoint", choices=tuple(ENDPOINTS), default="completions")
    group.add_argument(
        "--model", default="", help="served model name (default: the first that the server lists)"
    )
    group.add_argument("--rate", type=float, default=1.0, help="requests per second of poisson and constant")
    group.add_argument("--prompts", type=int, default=8, help="prompts of a rollout step")
    group.add_argument("--samples", type=int, default=4, help="answers to each prompt of a rollout step")
    group.add_argument("--rollout-steps", type=int, default=0, help="end after so many steps (0: by time)")
    group.add_argument(
        "--one-step-off",
        action="store_true",
        help="the next rollout step begins before the update, not after it",
    )
    group.add_argument("--input-tokens", default=Options.input_tokens, help="N, uniform:… or lognormal:…")
    group.add_argument("--output-tokens", default=Options.output_tokens, help="likewise")
    group.add_argument("--shared-prefix", default="", help="GROUPSxTOKENS: prompts of a group begin alike")
    group.add_argument(
        "--vocabulary",
        type=int,
        default=1000,
        help="token ids of prompts are below this: the size of the model's vocabulary at most",
    )
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument(
        "--logprobs",
        default="0",
        help="of so many of the most likely tokens, beside the sampled one's, as trainers ask; none: no logprobs",
    )
    group.add_argument("--request-timeout", type=float, default=600.0, help="seconds for a whole answer")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--update-every", default="", help="seconds between weight updates, or 'step'")
    group.add_argument("--checkpoints", nargs="*", default=[], help="folders pushed in turn")
    group.add_argument("--update-through", choices=("fp8ext", "stock"), default="fp8ext", help="whose routes")
    group.add_argument("--running", choices=RUNNING, default="keep", help="what a commit does to requests")
    group.add_argument(
        "--files", action="store_true", help="the server reads the checkpoints from its own disk"
    )
    group.add_argument("--scrape-every", type=float, default=1.0, help="seconds between reads of /metrics")
    group.add_argument("--slo", action="append", default=[], help="such as 'ttft_p99<0.5'; may be repeated")
    group.add_argument("--report", default="", help="folder for report.html and report.json")
    group.add_argument("--label", default="", help="name of this run in reports")


def listed() -> str:
    """All of them with what they mean, as a help text."""
    parser = ArgumentParser(usage=SUPPRESS, add_help=False)
    add(parser)
    return parser.format_help()


def _logprobs(text: str) -> int | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"logprobs: expected a number or none, found {text!r}") from None


def of(parsed: Any) -> Options:
    """Options from parsed arguments."""
    checkpoints: Sequence[str] | str = parsed.checkpoints
    return Options(
        profile=parsed.traffic,
        endpoint=parsed.endpoint,
        model=parsed.model or None,
        rate=float(parsed.rate),
        prompts=int(parsed.prompts),
        samples=int(parsed.samples),
        steps=int(parsed.rollout_steps),
        one_step_off=bool(parsed.one_step_off),
        input_tokens=parsed.input_tokens,
        output_tokens=parsed.output_tokens,
        shared_prefix=parsed.shared_prefix or None,
        vocabulary=int(parsed.vocabulary),
        temperature=float(parsed.temperature),
        logprobs=_logprobs(parsed.logprobs),
        timeout=float(parsed.request_timeout),
        seed=int(parsed.seed),
        update_every=parsed.update_every or None,
        checkpoints=tuple(checkpoints.split() if isinstance(checkpoints, str) else checkpoints),
        update_through=parsed.update_through,
        running=parsed.running,
        files=bool(parsed.files),
        scrape_every=float(parsed.scrape_every),
        slos=tuple(parsed.slo or ()),
        report=parsed.report or None,
        label=parsed.label or None,
    )

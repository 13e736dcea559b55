# SPDX-License-Identifier: Apache-2.0
"""Engines side by side on one GPU, each in a process of its own."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_fp8ext.bench.gpu_time import GpuTime
from vllm_fp8ext.errors import Fp8ExtError

if TYPE_CHECKING:
    from vllm_fp8ext.bench.steady import SteadyLoad, Window

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "blockfp8": {"quantization": "blockfp8"},
}
"""Arguments of vLLM, by variant."""
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
"""vLLM's counter of drafted tokens that were accepted."""
LENDS = "FP8EXT_BENCH_LENDS"
"""The environment variable that names the file of engines that lend."""


def with_graphs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the sizes of CUDA graphs that vLLM would choose to settings of ours.

    An engine that is told the size of its KV cache, or which sizes to capture, has fewer otherwise."""
    kernels = {"graph_tokens": "auto", **settings.get("kernels", {})}
    return {**settings, "kernels": kernels}


class EngineError(Fp8ExtError):
    """An engine ended before it answered."""


class Engine:
    """One engine; `arguments` are those of `vllm.LLM`. With `profile` it tells the times of its kernels instead. One that is
    `held` touches no GPU before it may `begin`: what it imports takes many seconds, beside another engine's work. Engines
    that lend each other the memory for K and V have it only in their `turn`s; `lends`: a path for a file of theirs, which the
    one that has it locks."""

    def __init__(
        self,
        checkpoint: Path,
        name: str,
        arguments: Mapping[str, Any],
        *,
        profile: bool = False,
        held: bool = False,
        lends: Path | None = None,
        period: int | None = None,
    ):
        """`period`: tokens after which each prompt repeats itself; by default none does."""
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._end, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(str(checkpoint), dict(arguments), profile, held, lends, period, there)
        )
        self._process.start()
        there.close()
        self._started = time.monotonic()
        self._answered = True
        self._held, self._imported = held, False
        self._lends = lends is not None

    def imported(self) -> None:
        """Until one that is held waits for nothing but its turn."""
        if self._held and not self._imported:
            self._ask()
            self._imported = True

    def begin(self) -> None:
        """Let one that was held go on."""
        self.imported()
        self._held, self._started = False, time.monotonic()
        with contextlib.suppress(OSError):  # whoever waits for it is told
            self._end.send("begin")

    def wait(self) -> float:
        """Until it is ready; seconds since its start, or since it began."""
        self._ask()
        return time.monotonic() - self._started

    @contextlib.contextmanager
    def turn(self) -> Generator[None]:
        """While it works: no other engine that lends its memory does."""
        if self._lends:
            self._ask("take")
        yield
        if self._lends:
            self._ask("lend")

    def seconds(self, requests: int, tokens: int, output: int, seed: int) -> float:
        """Time `requests` prompts of `tokens` random tokens with `output` tokens each, in seconds."""
        elapsed = self._ask((requests, tokens, output, seed))
        assert isinstance(elapsed, float)
        return elapsed

    def gpu_time(self, requests: int, tokens: int, output: int, seed: int) -> GpuTime:
        """The same, as a profile: of an engine in one process, whose host is slower."""
        profile = self._ask((requests, tokens, output, seed))
        assert isinstance(profile, GpuTime)
        return profile

    def linear_errors(self, tokens: tuple[int, ...]) -> dict[str, float]:
        """`served.linear_errors` of its first worker; nothing for engines of other methods than blockfp8."""
        errors: dict[str, float] = self._ask(("linear_errors", tokens))
        return errors

    def compiled(self) -> dict[str, int]:
        """Count its worker's compilations, by compiler; none for engines without this plugin."""
        counts: dict[str, int] = self._ask("compiled")
        return counts

    def steady(self, load: "SteadyLoad") -> "list[Window]":
        """Measure it under a load; it needs `disable_log_stats=False`."""
        windows: list[Window] = self._ask(load)
        return windows

    def prompt_logits(self, prompts: int, tokens: int, seed: int, file: Path) -> None:
        """Write the logits of prompts of random tokens (`divergence.write_prompt_logits`)."""
        self._ask(("prompt_logits", prompts, tokens, seed, file))

    def accepted(self) -> int:
        """Count the drafted tokens that it has accepted since it began; it needs `disable_log_stats=False`."""
        count: int = self._ask("accepted")
        return count

    def kv_tokens(self) -> int:
        """Tokens that its KV cache holds."""
        capacity: int = self._ask("kv_tokens")
        return capacity

    def close(self) -> None:
        """End it and the processes that it started: at once where an answer is no longer waited for, or it was never let go
        on."""
        if self._answered and not self._held:
            with contextlib.suppress(OSError):
                self._end.send(None)
            self._process.join(60)
        self._process.kill()
        assert self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, what: Any = None) -> Any:
        self._answered = False
        try:
            if what is not None:
                self._end.send(what)
            answer = self._end.recv()
            self._answered = True
            return answer
        except (EOFError, OSError):
            self._process.join(10)
            raise EngineError(f"the engine {self.name} ended: exit code {self._process.exitcode}") from None


def in_turn(held: Iterator[Engine]) -> Generator[tuple[Engine, float]]:
    """Yield engines one at a time, once each is ready, and its seconds until then. The next one
    is made, and has imported everything, before this one works."""
    following = next(held, None)
    try:
        while following:
            with contextlib.closing(following) as engine:
                following = None
                engine.begin()
                following = next(held, None)
                seconds = engine.wait()
                if following:
                    following.imported()
                yield engine, seconds
    finally:
        if following:
            following.close()


def _serve(
    checkpoint: str,
    arguments: dict[str, Any],
    profile: bool,
    held: bool,
    lends: Path | None,
    period: int | None,
    end: Connection,
) -> None:
    os.setpgid(0, 0)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function of ours goes to the workers
    if profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if lends:
        os.environ[LENDS] = str(lends)
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", "3600")  # it waits for others
        arguments |= {"enable_sleep_mode": True, "worker_cls": "vllm_fp8ext.bench.lending.Worker"}
    from vllm import LLM

    if held:
        end.send("imported")
        end.recv()
    engine = LLM(checkpoint, **arguments)
    if lends:
        _lend(engine)
    end.send("ready")
    while case := end.recv():
        end.send(_answer(engine, arguments, case, profile=profile, period=period))
    engine.llm_engine.engine_core.shutdown()  # else its processes and this one wait for each other


def _answer(
    engine: Any, arguments: Mapping[str, Any], case: Any, *, profile: bool, period: int | None
) -> Any:
    """Do what an `Engine` asks, and return what it is answered."""
    from vllm_fp8ext.bench.steady import Steady, SteadyLoad, kv_tokens

    if case == "take":
        engine.wake_up(["kv_cache", "scheduling"])
        return case
    if case == "lend":
        _lend(engine)
        return case
    if case == "compiled":
        return _compiled(engine, arguments)
    if case == "kv_tokens":
        return kv_tokens(engine)
    if case == "accepted":
        counted = {each.name: each.value for each in engine.get_metrics() if hasattr(each, "value")}
        return int(counted.get(ACCEPTED, 0))
    if isinstance(case, SteadyLoad):
        return Steady(engine, case).windows()
    if case[0] == "prompt_logits":
        from vllm_fp8ext.bench.divergence import write_prompt_logits

        write_prompt_logits(engine, *case[1:])
        return case[0]
    if case[0] == "linear_errors":
        return _linear_errors(engine, arguments, case[1])
    return _generated(engine, *case, profile=profile, period=period)


def _generated(
    engine: Any, requests: int, tokens: int, output: int, seed: int, *, profile: bool, period: int | None
) -> float | GpuTime:
    """Return the seconds of random prompts, or their profile. `period`: as of `Engine`."""
    import torch
    from vllm import SamplingParams

    vocabulary = engine.model_config.get_vocab_size()
    draw = torch.Generator().manual_seed(seed)
    unique = min(period or tokens, tokens)
    prompts: Any = [
        {
            "prompt_token_ids": torch.randint(vocabulary, (unique,), generator=draw)
            .repeat(-(-tokens // unique))[:tokens]
            .tolist()
        }
        for _ in range(requests)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            engine.generate(prompts, sampling, use_tqdm=False)
        cuda = torch.autograd.DeviceType.CUDA
        ran = [e for e in seen.events() or [] if e.device_type == cuda and not e.is_user_annotation]
        return GpuTime.of((e.name, e.time_range.start, e.time_range.end) for e in ran)
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(answer.outputs[0].token_ids) == output for answer in answers)
    return seconds


def _lend(engine: Any) -> None:
    engine.sleep(0)
    engine.release_kv_cache_memory()


def _linear_errors(engine: Any, arguments: Mapping[str, Any], tokens: tuple[int, ...]) -> dict[str, float]:
    if arguments.get("quantization") != "blockfp8":
        return {}
    from vllm_fp8ext.bench.served import linear_errors

    errors: dict[str, float] = engine.collective_rpc(linear_errors, args=(tokens,))[0]
    return errors


def _compiled(engine: Any, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return what the first worker has compiled."""
    if arguments.get("quantization") != "blockfp8":
        return {}
    counts: dict[str, int] = engine.collective_rpc("fp8ext_compiled")[0]
    return counts

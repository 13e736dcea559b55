# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of whole engines on one GPU: BF16, stock `fp8_per_block` and `blockfp8`, in turn.

    python benchmarks/rollout.py --shape Qwen3-8B --kv auto fp8 --out benchmarks/results/rollout_h200.json

Each variant is an engine in a process of its own; all are alive at once and take turns, so that they see the same GPU.
Weights are generated; token ids go in and come out. A case first runs once in every engine unmeasured.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from generated import SHAPES, write_checkpoint
from provenance import provenance

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "blockfp8": {"quantization": "blockfp8"},
}
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
VOCABULARY = 150_000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--kv", nargs="+", choices=("auto", "fp8"), default=["auto"])
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="REQUESTSxINPUTxOUTPUT",
        default=["1x1024x1024", "8x1024x1024", "8x512x256", "32x1024x1024", "128x1024x1024"],
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-gib", type=float, default=24.0, help="KV cache of each engine")
    parser.add_argument("--settings", type=json.loads, default={}, help="more settings of blockfp8, as JSON")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no repeat after so long")
    parser.add_argument(
        "--profile", type=Path, help="write kernel times of each case here, and measure nothing"
    )
    parser.add_argument("--checkpoint", type=Path, help="keep the generated weights here")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    stop = time.monotonic() + options.seconds
    with contextlib.ExitStack() as stack:
        folder = options.checkpoint or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "config.json").exists():
            write_checkpoint(folder, options.shape, 0, "cuda")
        engines = {
            (name, kv): stack.enter_context(contextlib.closing(Engine(folder, name, kv, options)))
            for kv in options.kv
            for name in options.variants
        }
        for engine in engines.values():
            engine.wait()
        cases = [case for text in options.cases for case in _measure(text, engines, options, stop)]
    if options.out and cases:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"provenance": provenance(), "cases": cases}, indent=1) + "\n")
    return 0


class Engine:
    """One engine in a process of its own."""

    def __init__(self, checkpoint: Path, name: str, kv: str, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, there = context.Pipe()
        arguments = _arguments(name, kv, options)
        profile = options.profile is not None
        self._process = context.Process(target=_serve, args=(str(checkpoint), arguments, profile, there))
        self._process.start()
        there.close()
        self._name, self._started = f"{name}, KV {kv}", time.monotonic()

    def wait(self) -> None:
        """Until it is ready. Engines start side by side."""
        self._end.recv()
        print(f"{self._name}: ready after {time.monotonic() - self._started:.0f} s", flush=True)

    def run(self, requests: int, tokens: int, output: int, seed: int) -> Any:
        """Seconds until all are answered, or the profile."""
        self._end.send((requests, tokens, output, seed))
        return self._end.recv()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.send(None)
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()


def _arguments(name: str, kv: str, options: argparse.Namespace) -> dict[str, Any]:
    settings = {**options.settings, **({"kv_scales": "static"} if kv == "fp8" else {})}
    return {
        **VARIANTS[name],
        "kv_cache_dtype": kv,
        "max_model_len": 2560,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": int(options.kv_gib * 2**30),
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "compilation_config": {"cudagraph_capture_sizes": CAPTURED},
        **({"additional_config": {"fp8ext": settings}} if name == "blockfp8" else {}),
    }


def _serve(checkpoint: str, arguments: dict[str, Any], profile: bool, end: Connection) -> None:
    if profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams

    engine = LLM(checkpoint, **arguments)
    end.send("ready")
    while case := end.recv():
        requests, tokens, output, seed = case
        draw = torch.Generator().manual_seed(seed)
        prompts: Any = [
            {"prompt_token_ids": torch.randint(VOCABULARY, (tokens,), generator=draw).tolist()}
            for _ in range(requests)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        if profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                engine.generate(prompts, sampling, use_tqdm=False)
            end.send(_kernels(seen))
            continue
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(answer.outputs[0].token_ids) == output for answer in answers)
        end.send(seconds)


def _kernels(seen: Any) -> list[tuple[str, float, int]]:
    """Name, milliseconds and launches of each kernel, the longest first."""
    found = [(event.key, event.self_device_time_total / 1e3, event.count) for event in seen.key_averages()]
    return sorted(found, key=lambda kernel: -kernel[1])


def _measure(
    text: str, engines: dict[tuple[str, str], Engine], options: argparse.Namespace, stop: float
) -> list[dict[str, Any]]:
    requests, tokens, output = map(int, text.split("x"))
    if options.profile:
        for (name, kv), engine in engines.items():
            engine.run(requests, tokens, output, 0)
            _write_profile(options.profile, f"{text} {name} KV {kv}", engine.run(requests, tokens, output, 1))
        return []
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in engines}
    for repeat in range(options.repeats + 1):
        if time.monotonic() > stop:
            break
        for key, engine in engines.items():
            first = engine.run(requests, tokens, 1, 2 * repeat)
            whole = engine.run(requests, tokens, output, 2 * repeat + 1)
            if repeat:
                samples[key].append((first, whole))
    return _cases(text, requests, tokens, output, samples, options)


def _cases(
    text: str,
    requests: int,
    tokens: int,
    output: int,
    samples: dict[tuple[str, str], list[tuple[float, float]]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    found = []
    for (name, kv), pairs in samples.items():
        if not pairs:
            print(f"{text}: no time left", flush=True)
            return []
        rates = [requests * output / whole for _, whole in pairs]
        case = {"model": options.shape, "requests": requests, "input": tokens, "output": output}
        case |= {"kv_cache": kv, "staging": "shadow" if name == "blockfp8" else "none", "variant": name}
        case |= {"tokens_per_s": statistics.median(rates), "samples": rates}
        case["ms_per_step"] = statistics.median(
            (whole - first) / (output - 1) * 1e3 for first, whole in pairs
        )
        case["first_token_ms"] = statistics.median(first * 1e3 for first, _ in pairs)
        base = next((c["tokens_per_s"] for c in found if c["variant"] == "bf16"), None)
        case["ratio_bf16"] = case["tokens_per_s"] / (base or case["tokens_per_s"])
        found.append(case)
        print(
            f"{text:14} KV {kv:4} {name:14} {case['tokens_per_s']:9.0f} tok/s {case['ms_per_step']:7.2f} ms/step "
            f"{case['first_token_ms']:8.1f} ms to the first {case['ratio_bf16']:5.2f}x",
            flush=True,
        )
    return found


def _write_profile(file: Path, title: str, kernels: list[tuple[str, float, int]]) -> None:
    with file.open("a") as out:
        print(f"== {title}: {sum(ms for _, ms, _ in kernels):.1f} ms", file=out)
        for name, ms, count in kernels[:24]:
            print(f"{ms:9.2f} ms {count:7} x {ms / count * 1e3:9.2f} us  {name[:110]}", file=out)


if __name__ == "__main__":
    sys.exit(main())

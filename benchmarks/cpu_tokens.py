# SPDX-License-Identifier: Apache-2.0
"""Output tokens per second on a CPU: blockfp8 (reference numerics) against vLLM's BF16, interleaved, medians.

python benchmarks/cpu_tokens.py --shape Qwen3-0.6B --out benchmarks/results/cpu_tokens.json
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_fp8ext.bench.generated import SHAPES, write_checkpoint
from vllm_fp8ext.bench.provenance import provenance, write_cases

_VARIANTS = ("bf16", "blockfp8")
_BATCHES = (1, 8)
_INPUT, _OUTPUT = 64, 32


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _child(*options.child)
    with tempfile.TemporaryDirectory(prefix="fp8ext-") as folder:
        write_checkpoint(Path(folder), options.shape, 0, "cpu")
        children = {variant: _start(variant, folder) for variant in _VARIANTS}
        samples: dict[tuple[str, int], list[float]] = {(v, b): [] for v in _VARIANTS for b in _BATCHES}
        for repeat in range(options.repeats + 1):
            for batch in _BATCHES:
                for variant, child in children.items():
                    value = _measure(child, batch)
                    if repeat:  # the first round warms up
                        samples[variant, batch].append(value)
        for child in children.values():
            child.stdin.close()
            child.wait()
    cases = [
        {
            "model": options.shape,
            "requests": batch,
            "input": _INPUT,
            "output": _OUTPUT,
            "variant": variant,
            "tokens_per_s": statistics.median(values),
            "samples": values,
        }
        for (variant, batch), values in samples.items()
    ]
    table = Table("requests", *_VARIANTS, "ratio")
    for batch in _BATCHES:
        medians = [statistics.median(samples[variant, batch]) for variant in _VARIANTS]
        table.add_row(str(batch), *(f"{value:.1f}" for value in medians), f"{medians[1] / medians[0]:.2f}")
    Console().print(table)
    write_cases(options.out, provenance(), cases)
    return 0


def _start(variant: str, model: str) -> Any:
    line = [sys.executable, "-P", __file__, "--child", variant, model]
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(
        line, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _measure(child: Any, batch: int) -> float:
    child.stdin.write(f"{batch}\n")
    child.stdin.flush()
    for line in child.stdout:
        if line.startswith("tokens_per_s "):
            return float(line.split()[1])
    raise RuntimeError(f"the engine ended with code {child.wait()}")


def _child(variant: str, model: str) -> int:
    from vllm import LLM, SamplingParams

    quantized = {"quantization": "blockfp8", "additional_config": {"fp8ext": {"staging": "none"}}}
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        **(quantized if variant == "blockfp8" else {}),
    )
    sampling = SamplingParams(max_tokens=_OUTPUT, temperature=0, ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        batch = int(line)
        prompts = [
            {"prompt_token_ids": [5 + (7 * i + j) % 1000 for i in range(_INPUT)]} for j in range(batch)
        ]
        start = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        print("tokens_per_s", batch * _OUTPUT / (time.perf_counter() - start), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""How long an engine takes for weights that a trainer loads in its workers, beside stock vLLM's layerwise reload.

    python benchmarks/adoption.py --shape Qwen3-8B --out benchmarks/results/adoption_h200.json

Each engine has a process of its own. The trainer's tensors lie on the rank's GPU in BF16, and come in buckets by one call:
`initialize_layerwise_reload`, `load_weights` for each bucket, `finalize_layerwise_reload`. `seconds`: from the first bucket
until the call has returned to the trainer, and new weights are served. The engine generates nothing meanwhile. `loading`: the
part inside `load_weights`, of the slowest rank. `pause`: of blockfp8, the part in which a commit holds the engine.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vllm_fp8ext.bench.generated import SHAPES, two_checkpoints
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.transports.wire import stored

ENGINES = ("blockfp8", "fp8_per_block")


def hold(worker: Any, folder: str) -> None:
    """Called in a worker: have a trainer's tensors on its GPU."""
    worker.held = [(name, tensor.cuda()) for name, tensor in stored(Path(folder))]
    torch.cuda.synchronize()


def send(worker: Any, bucket_bytes: int) -> float:
    """Called in a worker: load what it holds as a trainer does; returns the seconds inside `load_weights`."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, loading = worker.model_runner.get_model(), 0.0
    with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        initialize_layerwise_reload(model)
        bucket: list[tuple[str, torch.Tensor]] = []
        for number, (name, tensor) in enumerate(worker.held, 1):
            bucket.append((name, tensor))
            if sum(each.nbytes for _, each in bucket) < bucket_bytes and number < len(worker.held):
                continue
            begun = time.perf_counter()
            model.load_weights(bucket)
            torch.cuda.synchronize()
            loading, bucket = loading + time.perf_counter() - begun, []
        finalize_layerwise_reload(model, worker.model_config)
    torch.cuda.synchronize()
    return loading


def main() -> int:
    options = _options()
    if not torch.cuda.is_available():
        raise ConfigError("expected a GPU: on CPUs the numbers say nothing")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions travel to workers
    from vllm import LLM

    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fp8ext-", dir=options.dir) as scratch:
        folders = two_checkpoints(options.checkpoints, options.shape, Path(scratch), "cuda")
        for engine in ENGINES:
            llm = LLM(
                str(folders[0]),
                quantization=engine,
                max_model_len=1024,
                kv_cache_memory_bytes=4 << 30,
                gpu_memory_utilization=0.4,
                skip_tokenizer_init=True,
            )
            for number in range(options.updates):
                llm.collective_rpc(hold, args=(str(folders[(number + 1) % 2]),))
                begun = time.perf_counter()
                loading = max(llm.collective_rpc(send, args=(options.bucket_mib << 20,)))
                case = {"engine": engine, "number": number, "seconds": time.perf_counter() - begun}
                cases.append(case | {"loading": loading, "pause": _pause(llm, engine)})
            llm.llm_engine.engine_core.shutdown()
            del llm
    table = Table("engine", "update", "seconds", "inside load_weights", "pause of the commit")
    for case in cases:
        pause = "" if case["pause"] is None else f"{case['pause'] * 1e3:.1f} ms"
        row = f"{case['seconds']:.3f}", f"{case['loading']:.3f}", pause
        table.add_row(case["engine"], str(case["number"]), *row)
    Console().print(table)
    write_cases(options.out, provenance(), cases, model=options.shape, bucket_mib=options.bucket_mib)
    return 0


def _pause(llm: Any, engine: str) -> float | None:
    if engine != "blockfp8":
        return None
    with embedded_blocking(llm) as weights:
        last = weights.weights().last_update
    return None if last is None else last.seconds["pause"]


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--checkpoints", type=Path, nargs=2, help="these instead of generated weights")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--dir", type=Path, help="folder with room for two checkpoints")
    parser.add_argument("--out", type=Path, help="JSON results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""How long an engine takes for weights that a trainer loads in its workers, beside stock vLLM's layerwise reload.

    python benchmarks/adoption.py --shape Qwen3-8B --out benchmarks/results/adoption_h200.json
    python benchmarks/adoption.py --shape tiny --engines blockfp8 --cpu      # tries the script

Each engine has a process of its own. The trainer's tensors lie on the rank's GPU in BF16, and come in buckets by one call:
`initialize_layerwise_reload`, `load_weights` for each bucket, `finalize_layerwise_reload`. `seconds`: from the first bucket
until the call has returned to the trainer, and new weights are served. The engine generates nothing meanwhile. `loading`: the
part inside `load_weights`, of the slowest rank. `pause`: of blockfp8, the part in which a commit holds the engine. A blockfp8
engine must serve each update as a new epoch, and agree with it when it verifies.
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
    """Called in a worker: have a trainer's tensors on its device."""
    worker.held = []  # not two checkpoints at a time
    worker.held = [(name, tensor.to(worker.device)) for name, tensor in stored(Path(folder))]
    _finish(worker)


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
            _finish(worker)
            loading, bucket = loading + time.perf_counter() - begun, []
        finalize_layerwise_reload(model, worker.model_config)
    _finish(worker)
    return loading


def main() -> int:
    options = _options()
    if not options.cpu and not torch.cuda.is_available():
        raise ConfigError("expected a GPU: on CPUs the numbers say nothing; --cpu tries the script")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions travel to workers
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fp8ext-", dir=options.dir) as scratch:
        folders = two_checkpoints(options.checkpoints, options.shape, Path(scratch))
        for engine in options.engines:
            cases += _measured(engine, folders, options)
            write_cases(options.out, provenance(), cases, model=options.shape, bucket_mib=options.bucket_mib)
    table = Table("engine", "update", "seconds", "inside load_weights", "pause of the commit")
    for case in cases:
        pause = "" if case["pause"] is None else f"{case['pause'] * 1e3:.1f} ms"
        row = f"{case['seconds']:.3f}", f"{case['loading']:.3f}", pause
        table.add_row(case["engine"], str(case["number"]), *row)
    Console().print(table)
    return 0


def _measured(engine: str, folders: list[Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the updates of one engine, which ends with this."""
    from vllm import LLM

    cases: list[dict[str, Any]] = []
    llm = LLM(
        str(folders[0]),
        quantization=engine,
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_memory_bytes=(4 << 30) if torch.cuda.is_available() else (64 << 20),
        gpu_memory_utilization=0.4,
        skip_tokenizer_init=True,
    )
    for number in range(options.updates):
        llm.collective_rpc(hold, args=(str(folders[(number + 1) % 2]),))
        begun = time.perf_counter()
        loading = max(llm.collective_rpc(send, args=(options.bucket_mib << 20,)))
        case = {"engine": engine, "number": number, "seconds": time.perf_counter() - begun}
        pause = _pause(llm, number + 1) if engine == "blockfp8" else None
        cases.append(case | {"loading": loading, "pause": pause})
    llm.llm_engine.engine_core.shutdown()
    return cases


def _pause(llm: Any, epoch: int) -> float:
    """Return seconds in which the last commit held the engine.

    Raises:
        RuntimeError: another epoch is served.
    """
    with embedded_blocking(llm) as weights:
        served, last = weights.verify().epoch, weights.weights().last_update
    if served != epoch or last is None:
        raise RuntimeError(f"expected epoch {epoch} to be served, found {served}")
    return float(last.seconds["pause"])


def _finish(worker: Any) -> None:
    """Wait for what the worker's device has to do."""
    if worker.device.type != "cpu":
        torch.accelerator.synchronize()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--checkpoints", type=Path, nargs=2, help="these instead of generated weights")
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=list(ENGINES), help="in turn")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--cpu", action="store_true", help="run without a GPU")
    parser.add_argument("--dir", type=Path, help="folder with room for two checkpoints")
    parser.add_argument("--out", type=Path, help="JSON results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

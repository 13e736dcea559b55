# SPDX-License-Identifier: Apache-2.0
"""Peak GPU memory while a BF16 checkpoint is loaded and quantized layer by layer, against the FP8 model that remains.

python benchmarks/load_memory.py --shape Qwen3-8B --out benchmarks/results/load_memory_h200.json
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> int:
    import torch

    from vllm_fp8ext.bench.generated import SHAPES, write_checkpoint
    from vllm_fp8ext.bench.provenance import provenance, write_cases

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fp8ext-", dir=options.dir) as scratch:
        write_checkpoint(Path(scratch), options.shape, 0, "cuda")
        torch.cuda.empty_cache()
        case = {"model": options.shape, **_measure(scratch)}
    print(json.dumps(case, indent=1))
    write_cases(options.out, provenance(), [case])
    return 0


def _measure(checkpoint: str) -> dict[str, Any]:
    import torch
    from vllm import LLM
    from vllm.v1.worker.gpu_worker import Worker

    seen: dict[str, int] = {}
    load = Worker.load_model

    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = load(self, *args, **kwargs)
        seen["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        seen["model_bytes"] = torch.cuda.memory_allocated() - before
        return result

    Worker.load_model = measured
    engine = LLM(
        checkpoint,
        quantization="blockfp8",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 30,
        additional_config={"fp8ext": {"staging": "none"}},
    )
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    layers = [2 * m.weight.numel() for m in model.modules() if hasattr(m, "weight_scale_inv")]
    return {
        **seen,
        "extra_bytes": seen["peak_bytes"] - seen["model_bytes"],
        "largest_bf16_layer_bytes": max(layers),
    }


if __name__ == "__main__":
    sys.exit(main())

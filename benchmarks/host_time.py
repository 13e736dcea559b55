# SPDX-License-Identifier: Apache-2.0
"""What a layer's operators take the host in a step without CUDA graphs: microseconds of each call, many queued at a time.

    python benchmarks/host_time.py --out host_time.json
    PYTHONPATH=.venv/beside python benchmarks/host_time.py    # after make test on a machine without a GPU

Of Qwen3-8B's layer, for more tokens than `decode_gemm` takes; on a GPU beside vLLM's quantization and DeepGEMM. Without a
GPU the launches themselves and the GEMM are left out: what is left is Python and torch, and what Triton does before it
launches. Of attention what is around FlashAttention: for prompts, and for prompts beside requests that decode.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.kernels.gemm.registry import GemmKernel, register
from vllm_fp8ext.kernels.runtime import cuda_kernel, nvrtc
from vllm_fp8ext.kernels.testing import kernel_cases

HIDDEN, WIDE, FUSED = 4096, 12288, 6144
"""Columns: of a token, of the MLP, of Q, K and V."""
TOKENS = 1024
DECODING, CONTEXT, BLOCK = 64, 256, 16
"""Requests that decode beside one prompt, tokens of each request's context, and of a block of the KV cache."""
QUEUED = 100
"""Calls in a row: a GPU's queue holds a thousand launches."""
VLLM = "vLLM's quantization and DeepGEMM"
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument(
        "--variant", default="blockfp8", help="what these operators are called in the results"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    origin = provenance()
    real = torch.cuda.is_available()
    if not real:
        _without_launches()
    with torch.inference_mode():
        device = "cuda" if real else "cpu"
        layer = operators(device, TOKENS if real else 4)
        calls = layer | attention(device)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(options.repeats + 1):
            for name, call in calls.items():
                us = _timed(call)
                if repeat:  # the first compiles
                    samples[name].append(us)
    cases: list[dict[str, Any]] = [
        {
            "kernel": name,
            "variant": "vllm" if name.startswith(VLLM) else options.variant,
            "launches": real,
            "us": statistics.median(times),
            "samples": times,
        }
        for name, times in samples.items()
    ]
    write_cases(options.out, origin, cases)
    table = Table("operator", "us")
    for case in cases:
        table.add_row(case["kernel"], f"{case['us']:.1f}")
    ours = sum(case["us"] for case in cases if case["kernel"] in layer and case["variant"] != "vllm")
    table.add_row("a layer's operators, ours", f"{ours:.1f}")
    console.print(table)


def operators(device: str, tokens: int) -> dict[str, Callable[[], object]]:
    """Those of a layer, by name and place."""
    import vllm_fp8ext.kernels.attention.rotary  # registers one

    ops = torch.ops.fp8ext
    real = device == "cuda"

    def weight(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.zeros(n, k, dtype=torch.float8_e4m3fn, device=device)
        return codes, torch.ones(n // 128, k // 128, device=device)

    if real:
        import vllm_fp8ext.layers.gemm_kernels  # noqa: F401  # brings DeepGEMM
    qkv, out, gate_up, down = (
        weight(*shape) for shape in ((FUSED, HIDDEN), (HIDDEN, HIDDEN), (2 * WIDE, HIDDEN), (HIDDEN, WIDE))
    )
    x, active, fused, wide = (
        torch.ones(tokens, columns, dtype=torch.bfloat16, device=device)
        for columns in (HIDDEN, WIDE, FUSED, 2 * WIDE)
    )
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    positions, table, norms, scale = kernel_cases.rotary(tokens, device)
    rest = (None, "fp32", 1, "deep_gemm" if real else "none")
    calls: dict[str, Callable[[], object]] = {
        "rmsnorm_linear, Q, K and V": lambda: ops.rmsnorm_linear.default(x, x, norm, 1e-6, *qkv, *rest),
        "norm_rope": lambda: ops.norm_rope.default(
            fused, positions, table, norms.query_D, norms.key_D, 1e-6, scale, 32, 8
        ),
        "linear, output": lambda: ops.linear.default(x, *out, *rest),
        "rmsnorm_linear, gate and up": lambda: ops.rmsnorm_linear.default(x, x, norm, 1e-6, *gate_up, *rest),
        "gated_linear, down": lambda: ops.gated_linear.default(wide, "silu", *down, *rest),
    }
    if real:
        from vllm_fp8ext.bench.rivals import rivals

        gemm: Any = rivals(["deep_gemm"])["deep_gemm"]
        for name, matrix, tokens_MK in (("output", out, x), ("down", down, active)):
            calls[f"{VLLM}, {name}"] = partial(gemm(*matrix), tokens_MK)
    return calls


def attention(device: str) -> dict[str, Callable[[], object]]:
    """What a layer's attention does around FlashAttention, and around vLLM's kernel that caches K and V."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import ForwardContext, override_forward_context

    from vllm_fp8ext.compat.speed import decode_attention
    from vllm_fp8ext.kernels.attention.decode_attention import DecodeAttention
    from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE

    heads, kv_heads, size, tokens = 32, 8, 128, TOKENS
    blocks = CONTEXT // BLOCK
    one = torch.ones((), device=device)
    impl = SimpleNamespace(scale=0.1, forward=lambda *_: None, do_kv_cache_update=lambda *_: None)
    layer: Any = SimpleNamespace(
        impl=impl, layer_name="layer", kv_cache_dtype="fp8", _q_scale=one, _k_scale=one, _v_scale=one
    )
    kernel = DecodeAttention(heads, kv_heads, 2 * DECODING, one.device)
    decode_attention.replace_attention(layer, kernel, "fp32")
    query = torch.zeros(tokens, heads, size, dtype=FP8_DTYPE, device=device)
    # as they come from the operator that makes them, with V a part of what a linear layer made
    key = torch.zeros(tokens, kv_heads, size, dtype=torch.bfloat16, device=device)
    value = torch.zeros(tokens, FUSED, dtype=torch.bfloat16, device=device)[:, -kv_heads * size :]
    value = value.unflatten(1, (kv_heads, size))
    room = torch.ops.fp8ext.quantized_room(value.flatten(1), heads * size)
    output, scales = room[0].view(tokens, heads, size), room[1]
    requests = DECODING + 1
    layer.kv_cache = torch.zeros(
        requests * blocks, BLOCK, kv_heads, 2 * size, dtype=torch.uint8, device=device
    ).transpose(1, 2)
    table = torch.arange(requests * blocks, dtype=torch.int32, device=device).view(requests, blocks)
    steps = _attention_metadata(table, tokens)
    metadata = list(steps.values())[-1]
    slots = metadata.slot_mapping
    context = ForwardContext(
        no_compile_layers={"layer": layer},
        attn_metadata={"layer": metadata},
        slot_mapping={"layer": slots},
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
    )

    def caching() -> None:
        with override_forward_context(context):
            impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)

    calls: dict[str, Callable[[], object]] = {
        f"attention of {name}": partial(
            impl.forward, layer, query, key, value, layer.kv_cache, of, output, None, scales
        )
        for name, of in steps.items()
    }
    return calls | {"whether attention caches K and V": caching}


def _attention_metadata(table_RB: Tensor, tokens: int) -> dict[str, Any]:
    """Return metadata of steps with so many tokens: prompts alone, and beside requests that decode."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    from vllm_fp8ext.compat.speed import decode_prefill_split

    device = table_RB.device
    steps = {}
    for name, single in (("prompts", 0), ("prompts beside requests that decode", DECODING)):
        count = single + 1
        steps[name] = metadata = FlashAttentionMetadata(
            num_actual_tokens=tokens,
            max_query_len=tokens - single,
            query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=device),
            max_seq_len=CONTEXT,
            seq_lens=torch.full((count,), CONTEXT, dtype=torch.int32, device=device),
            block_table=table_RB[:count],
            slot_mapping=torch.arange(tokens, device=device),
        )
        if single:
            setattr(metadata, decode_prefill_split._SINGLE, decode_prefill_split._Single(single, None))
    return steps


def _timed(call: Callable[[], object]) -> float:
    """Microseconds of one call, while the GPU is behind."""
    start = time.perf_counter()
    for _ in range(QUEUED):
        call()
    us = (time.perf_counter() - start) / QUEUED * 1e6
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return us


def _without_launches() -> None:
    """A GPU for Triton that compiles and runs nothing, and a GEMM that gives room for its result alone."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    class StandInKernel:
        function = packed_metadata = None

        def launch_metadata(self, *_: Any) -> None:
            return None

        def run(self, *_: Any) -> None:
            pass

        def __getitem__(self, grid: Any) -> Any:
            return lambda *values: self.run(grid, *values)

    def compiled(self: Any, key: str, *_: Any, **__: Any) -> StandInKernel:
        kernel = self.device_caches[0][0][key] = StandInKernel()
        return kernel

    jit.JITFunction._do_compile = compiled
    gpu = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(gpu)
    torch.cuda.current_stream = lambda _: SimpleNamespace(cuda_stream=0)  # type: ignore[assignment, return-value]  # no GPU
    nvrtc.compile_source = lambda *_: b""
    cuda_kernel.call = lambda *_: None  # type: ignore[assignment]  # no driver
    cuda_kernel.Kernel.resident_blocks = lambda *_: 132  # type: ignore[method-assign]  # an H200's

    def no_gemm(x: Any, codes: Any, _: Any, dtype: torch.dtype) -> Any:
        return torch.empty(x.codes.shape[0], codes.shape[0], dtype=dtype)

    register(GemmKernel(name="none", run=no_gemm))


if __name__ == "__main__":
    main()

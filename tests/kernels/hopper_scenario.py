# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels for a Hopper GPU, on any machine with Triton; writes what their code has."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from vllm_fp8ext.kernels.attention import norm_rope
from vllm_fp8ext.kernels.gemm import block_gemm
from vllm_fp8ext.kernels.quantize import (
    dequantize,
    gated_quantize,
    quantize_activation,
    quantize_gradient,
    rmsnorm_quantize,
    transpose_blocks,
)

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {"codes": "*u8", "scale": "*fp32", "epsilon": "fp32", "positions": "*i64"}
"""Types of pointers by what their names begin with; others are BF16."""
ODD = "M", "N", "offset"
"""Numbers that may be any; the others are multiples of 16 in a model."""


def cases() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, str], dict[str, int]]]:
    """List kernels: a name, the function, constants, types beside `TYPES`, options."""
    eight = {"num_warps": 8}
    for e5m2 in (False, True):
        for even in (False, True):
            sizes = {"TOKENS": 128, "ROWS": 128, "TOGETHER": 8, "SIZE": 128}
            types = {"x_MK": "*u8", "weight_NK": "*u8", "x_scales": "*fp32", "weight_scales": "*fp32"}
            constants = {"E5M2": e5m2, "EVEN": even, "HARDWARE": True, **sizes}
            options = {"num_warps": 8, "num_stages": 4}
            yield f"block_gemm {e5m2=} {even=}", block_gemm._block_gemm, constants, types, options
        for short in (False, True):
            constants = {
                "POW2": not short,
                "E5M2": e5m2,
                "SHORT": short,
                "HARDWARE": True,
                "TILE": 64,
                "SIZE": 128,
            }
            types = {"x_MK": "*bf16" if short else "*fp32", "x_MN": "*bf16" if short else "*fp32"}
            for function in (quantize_gradient._quantize_rows, quantize_gradient._quantize_columns):
                yield f"{function.__name__} {e5m2=} {short=}", function, constants, types, eight
        constants = {"E5M2": e5m2, "SCALED": 128, "HARDWARE": True, "ROWS": 32, "SIZE": 128}
        yield f"dequantize {e5m2=}", dequantize._dequantize, constants, {}, {}
    of_server = {"POW2": False, "HARDWARE": True, "EARLY": True, "GROUPS": 8, "SIZE": 128}
    plain = of_server | {"SHORT": True, "TOKENS": 4, "PLACES": 0}
    kernel = quantize_activation._quantize_activation
    yield "quantize_activation", kernel, plain, {"places_MT": "*i32"}, {}
    joined = of_server | {"ADD": True, "ADDS_ONE": False}
    yield "rmsnorm_quantize", rmsnorm_quantize._rmsnorm_quantize, joined, {}, {}
    gated = of_server | {"TOKENS": 4, "ACTIVATION": "silu", "CHOSEN": False}
    yield "gated_quantize", gated_quantize._gated_quantize, gated, {"rows_S": "*i32"}, {}
    for again in (False, True):
        constants = {"AGAIN": again, "POW2": False, "HARDWARE": True, "SIZE": 128}
        types = {"out_KM": "*u8", "out_scales": "*fp32"}
        yield f"transpose_blocks {again=}", transpose_blocks._transpose_blocks, constants, types, eight
    for height, width, interleaved in ((0, 0, False), (24, 24, False), (20, 20, True)):
        constants = {
            "H": 28,
            "G": 4,
            "HALF": 64,
            "HEADS": 8,
            "NORM": height == 0,
            "SCALES": 1,
            "HARDWARE": True,
        }
        constants |= {"EARLY": True, "HEIGHT": height, "WIDTH": width, "INTERLEAVED": interleaved}
        types = {"q_scale": "*fp32", "query_MHD": "*u8"}
        yield f"norm_rope {height} {width} {interleaved}", norm_rope._norm_rope, constants, types, {}


def compiled(function: Any, constants: dict[str, Any], types: dict[str, str], options: dict[str, int]) -> Any:
    """Compile as a launch would whose pointers and sizes are multiples of 16."""
    names = function.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name) or type_of(name) for name in names
    }
    even = [name for name in names if name not in constants and name not in ODD and signature[name] != "fp32"]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    return compile(source, target=HOPPER, options=options)


def type_of(name: str) -> str:
    """Name the type of a kernel's parameter: a pointer where a shape ends its name, else a number."""
    known = next((kind for start, kind in TYPES.items() if name.startswith(start)), "*bf16")
    _, _, shape = name.rpartition("_")
    is_pointer = name == "scales" or ("_" in name and shape.rstrip("b").isupper())
    return known if is_pointer or name == "epsilon" else "i32"


def main() -> None:
    told = {}
    for name, *case in cases():
        code = compiled(*case).asm["ptx"]
        products = {line.split()[0] for line in code.splitlines() if "wgmma.mma_async.sync" in line}
        told[name] = {"products": sorted(products), "copies ahead": "cp.async" in code}
    print(json.dumps(told))


if __name__ == "__main__":
    sys.exit(main())

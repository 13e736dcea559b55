# SPDX-License-Identifier: Apache-2.0
"""Every kernel against the reference on this GPU, one line each: `fp8ext bench kernels --check`."""

import itertools
import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.attention import norm_rope
from vllm_fp8ext.kernels.attention.kv_amax import AmaxTally, kv_amax_reference
from vllm_fp8ext.kernels.attention.position_sections import PositionSections
from vllm_fp8ext.kernels.attention.rescale_kv import CachedLayer, rescale_kv, rescale_kv_reference
from vllm_fp8ext.kernels.gemm import decode_gemm, decode_gemm_configs, decode_gemm_triton
from vllm_fp8ext.kernels.gemm.decode_gemm_configs import TileConfig
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.quantize import (
    gated_quantize,
    quantize_activation,
    quantize_weight,
    rmsnorm_quantize,
)
from vllm_fp8ext.kernels.quantize.gated_quantize import Activation
from vllm_fp8ext.kernels.testing import kernel_cases

FORMATS: tuple[ScaleFormat, ...] = ("fp32", "pow2")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Verdict = tuple[bool, str]


def check(only: str) -> int:
    """Run the checks that have `only` in their name; 1 if something is wrong.

    Raises:
        ConfigError: none has.
    """
    checks = _checks()
    chosen = [(what, call) for what, call in checks if only in what]
    if not chosen:
        kinds = ", ".join(dict.fromkeys(what.split()[0] for what, _ in checks))
        raise ConfigError(
            f"--check: expected a part of a check's name (they begin with {kinds}), found {only!r}"
        )
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    start = time.perf_counter()
    good = [_verdict(what, call) for what, call in chosen]
    print(f"{sum(good)} good, {len(good) - sum(good)} bad, {time.perf_counter() - start:.0f} s")
    return 0 if all(good) else 1


def _verdict(what: str, call: Callable[[], Verdict]) -> bool:
    try:
        good, text = call()
    except Exception as error:
        good, text = False, f"{type(error).__name__}: {error}"[:300]
    print("ok " if good else "BAD", what, text, flush=True)
    return good


def _checks() -> list[tuple[str, Callable[[], Verdict]]]:
    checks: list[tuple[str, Callable[[], Verdict]]] = []
    for form, dtype in itertools.product(FORMATS, DTYPES):
        for shape in ((4096, 4096), (200, 328), (1, 1), (129, 257)):
            checks.append((f"weight {form} {dtype} {shape}", partial(weight, form, dtype, shape)))
    for form, (m, k) in itertools.product(FORMATS, ((64, 4096), (3, 200), (7, 5120), (2051, 5000))):
        checks.append((f"activation {form} {m}x{k}", partial(activation, form, m, k)))
        checks.append((f"rmsnorm {form} {m}x{k}", partial(rmsnorm, form, m, k)))
        for activated in gated_quantize.ACTIVATIONS:
            checks.append((f"{activated}_mul {form} {m}x{k}", partial(gated, activated, form, m, k)))
    for m in (1, 7, 300):
        checks.append((f"norm_rope {m}", partial(turned, m)))
        for sections in (PositionSections(16, 24, 24, False), PositionSections(24, 20, 20, True)):
            checks.append((f"norm_rope {m} {sections}", partial(turned, m, sections)))
    for case in ((1, 4096, 4096, 4), (33, 200, 1040, 2), (64, 4096, 12288, 1)):
        checks.append((f"triton {case}", partial(triton, *case)))
    for config, (m, n, k, bias) in itertools.product(kernel_cases.TILE_CONFIGS, kernel_cases.DECODE_SHAPES):
        form = FORMATS[m % 2]
        if config.fits(decode_gemm_configs.width(m), k):
            name = f"decode {config} {form} {m}x{n}x{k}{' bias' if bias else ''}"
            checks.append((name, partial(decode, form, config, m, n, k, bias)))
    for form, (m, splits) in itertools.product(FORMATS, ((1, 1), (7, 2), (33, 4), (64, 1), (100, 8))):
        checks.append((f"decode prologue {form} {m} {splits}", partial(prologue, form, m, splits)))
    checks.append(("kv_rescale", kv_rescale))
    checks += [(f"kv_amax {tokens}", partial(kv_amax, tokens)) for tokens in (1, 128, 8192)]
    return checks


def weight(form: ScaleFormat, dtype: torch.dtype, shape: tuple[int, int]) -> Verdict:
    noise = torch.Generator("cuda").manual_seed(1)
    values, sizes = (torch.randn(shape, generator=noise, device="cuda") for _ in range(2))
    values = (values * torch.exp(1.5 * sizes)).to(dtype)
    values[::7, ::5] = -0.0
    values[:BLOCK, : BLOCK // 2] *= 1e-6
    codes = torch.empty(shape, dtype=reference.FP8_DTYPE, device="cuda")
    scales = torch.empty(blocks(shape[0]), blocks(shape[1]), device="cuda")
    error, norm = quantize_weight.quantize_weight(values, codes, scales, form)
    expected = reference.quantize_weight(values.cpu(), form)
    lost = reference.dequantize_weight(codes, scales).double() - values.double()
    expected_sums = (float(lost.square().sum()), float(values.double().square().sum()))
    sums = all(
        math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-20)
        for a, b in zip((error, norm), expected_sums, strict=True)
    )
    equal = kernel_cases.same(codes, expected[0]), kernel_cases.same(scales, expected[1])
    return all(equal) and sums, f"codes and scales equal {equal}, sums close {sums}"


def activation(form: ScaleFormat, m: int, k: int) -> Verdict:
    x = kernel_cases.activations(m, k, "cuda")
    quantized = quantize_activation.quantize_activation(x, form)
    equal = [
        kernel_cases.same(a, b)
        for a, b in zip(quantized, reference.quantize_activation(x.cpu(), form), strict=True)
    ]
    return all(equal), f"codes and scales equal {equal}"


def rmsnorm(form: ScaleFormat, m: int, k: int) -> Verdict:
    x, residual = kernel_cases.activations(m, k, "cuda"), kernel_cases.activations(m, k, "cuda", 5)
    scaling = torch.rand(k, device="cuda").bfloat16() + 0.5
    return normed(
        rmsnorm_quantize.rmsnorm_quantize(x, residual, scaling, 1e-6, form, small_m=m < 64),
        *(x, residual, scaling, form),
    )


def normed(
    results: tuple[Quantized, Tensor], x: Tensor, residual: Tensor, scaling: Tensor, form: ScaleFormat
) -> Verdict:
    """Results of `rmsnorm_quantize`."""
    quantized, added = results
    return nearly(
        (*quantized, added), rmsnorm_quantize.rmsnorm_quantize_reference(x, residual, scaling, 1e-6, form)
    )


def gated(name: Activation, form: ScaleFormat, m: int, k: int) -> Verdict:
    gate_up = kernel_cases.activations(m, 2 * k, "cuda") / 8
    quantized = gated_quantize.gated_quantize(gate_up, name, form)
    return nearly(quantized, gated_quantize.gated_quantize_reference(gate_up, name, form))


def turned(m: int, sections: PositionSections | None = None) -> Verdict:
    """Queries and keys of a layer, normed, turned, the former quantized. With `sections` a token has three positions."""
    heads, kv_heads = kernel_cases.Q_HEADS, kernel_cases.KV_HEADS
    qkv = kernel_cases.activations(m, (heads + 2 * kv_heads) * kernel_cases.HEAD_DIM, "cuda")
    positions, *rest = kernel_cases.rotary(m, "cuda")
    if sections is not None:
        noise = torch.Generator("cuda").manual_seed(m)
        positions = torch.randint(4096, (3, m + 1), generator=noise, device="cuda")[:, :m]
    arguments = (qkv, positions, *rest, heads, kv_heads, sections)
    return alike(norm_rope.norm_rope(*arguments), norm_rope.norm_rope_reference(*arguments))


def alike(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> Verdict:
    """Codes and values of other roundings here and there, nothing more."""
    differing = _differing(actual, expected)
    distance = [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(actual, expected, strict=True)
    ]
    good = max(differing) < 2e-3 and max(distance) < 2e-3
    return good, f"differing {[f'{part:.1e}' for part in differing]} distance {distance}"


def kv_rescale() -> Verdict:
    """Some blocks of some layers, with ratios that clamp and that flush."""
    memory = kernel_cases.kv_memory(3, 70, "cuda")
    copy = memory.clone()
    ratios = torch.linspace(0.01, 3, kernel_cases.KV_HEADS), torch.linspace(500, 0.3, kernel_cases.KV_HEADS)
    blocks = list(range(1, 70, 3))
    layers, others = (
        [CachedLayer(*pair, *ratios) for pair in kernel_cases.kv_views(part)] for part in (memory, copy)
    )
    counts = rescale_kv(layers, blocks)
    equal = (
        counts == rescale_kv_reference(others, torch.tensor(blocks, device="cuda")),
        kernel_cases.same(memory, copy),
    )
    return all(equal), f"counts and codes equal {equal}, {counts}"


def kv_amax(tokens: int) -> Verdict:
    step, scales = (
        kernel_cases.kv_step(tokens, "cuda"),
        tuple(torch.full((), 0.01, device="cuda") for _ in range(3)),
    )
    tally = AmaxTally(kernel_cases.KV_HEADS, torch.device("cuda"))
    tally.add(step, torch.arange(tokens, device="cuda"), scales)
    return tallied(tally, step, scales)


def tallied(tally: AmaxTally, step: tuple[Tensor, Tensor, Tensor], scales: tuple[Tensor, ...]) -> Verdict:
    """Return a tally's amaxes of one step's K, V and Q."""
    seen = tally.take()
    expected = [kv_amax_reference(part, scale) for part, scale in zip(step, scales, strict=True)]
    equal = torch.equal(seen.amax, torch.stack([top for top, _ in expected]).cpu())
    counts = torch.equal(seen.saturated, torch.stack([over for _, over in expected]).cpu())
    return equal and counts, f"amaxes and counts equal {(equal, counts)}"


def _differing(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    """Return the share of bytes that differ, for each pair."""
    return [
        float((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).float().mean())
        for a, b in zip(actual, expected, strict=True)
    ]


def nearly(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> Verdict:
    """Allow for sums in another order, which move a rounding to BF16 here and there."""
    differing = _differing(actual, expected)
    values, expected_values = (reference.dequantize_activation(*parts[:2]) for parts in (actual, expected))
    distance = float((values - expected_values).norm() / expected_values.norm())
    good = max([differing[0], *differing[2:]]) < 2e-3 and distance < 2e-3
    return good, f"differing {[f'{part:.1e}' for part in differing]} distance {distance:.1e}"


def decode(form: ScaleFormat, config: TileConfig, m: int, n: int, k: int, biased: bool) -> Verdict:
    x = kernel_cases.activations(m, k, "cuda")
    codes, scales = reference.quantize_weight(kernel_cases.weight(n, k, "cuda"), form)
    bias = torch.randn(n, device="cuda").bfloat16() if biased else None
    outs = [decode_gemm.decode_gemm(x, codes, scales, bias, form, config) for _ in range(4)]
    torch.cuda.synchronize()
    expected = reference.quantize_activation(x, form)
    error = kernel_cases.gemm_error(outs[0], *expected, codes, scales, bias)
    repeatable = all(kernel_cases.same(outs[0], out) for out in outs[1:])
    before = quantize_activation.quantize_activation(x, form)
    outs.append(decode_gemm.decode_gemm(before, codes, scales, bias, form, config))
    repeatable &= kernel_cases.same(outs[0], outs[-1])
    text = f"error/bound {error:.3f} repeatable {repeatable}"
    if not error < 1:
        text += _where(outs[0], reference.gemm(*expected, codes, scales))
    return error < 1 and repeatable, text


def prologue(form: ScaleFormat, m: int, splits: int) -> Verdict:
    """The activations' codes and scales, read off: a weight that is one on the diagonal gives them back, dequantized and
    rounded to BF16; for one token a bias takes the result away again, and what comes is what the rounding cut."""
    k = 1040
    noise = torch.Generator("cuda").manual_seed(m)
    values, sizes = (torch.randn(m, k, generator=noise, device="cuda") for _ in range(2))
    x = (values * torch.exp(2 * sizes)).bfloat16()
    x[:, ::9] = -0.0
    x[-1, :BLOCK] = 0
    x[-1, BLOCK : 2 * BLOCK] *= 2.0**-40
    codes = torch.eye(k, device="cuda").to(reference.FP8_DTYPE)
    scales = torch.ones(blocks(k), blocks(k), device="cuda")
    config = TileConfig(rows=128, splits=splits)
    out = decode_gemm.decode_gemm(x, codes, scales, None, form, config)
    exact = reference.dequantize_activation(*reference.quantize_activation(x.cpu(), form)).cuda()
    equal = [torch.equal(out, exact.bfloat16())]
    if m == 1:
        rest = decode_gemm.decode_gemm(x, codes, scales, -out[0], form, config)
        equal.append(torch.equal(rest, (exact - out.float()).bfloat16()))
    return all(equal), f"equal {equal}"


def _where(out: Tensor, expected: Tensor) -> str:
    wrong = ~((out.float() - expected).abs() <= 0.05 * expected.abs().max())
    rows, tokens = (wrong.any(dim).nonzero().flatten()[:8].tolist() for dim in (0, 1))
    first = out[0, :4].tolist(), expected[0, :4].tolist()
    return f" wrong {float(wrong.float().mean()):.3f} rows {rows} tokens {tokens} begin {first}"


def triton(m: int, n: int, k: int, splits: int) -> Verdict:
    x = kernel_cases.activations(m, k, "cuda")
    codes, scales = reference.quantize_weight(kernel_cases.weight(n, k, "cuda"))
    config = decode_gemm_triton.TritonTileConfig(splits=splits)
    out = decode_gemm_triton.decode_gemm_triton(x, codes, scales, None, "fp32", config)
    error = kernel_cases.gemm_error(out, *reference.quantize_activation(x), codes, scales)
    return error < 1, f"error/bound {error:.3f}"

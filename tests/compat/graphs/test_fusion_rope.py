# SPDX-License-Identifier: Apache-2.0
"""The pass that joins norms of heads, rotary embedding and quantization of queries, on graphs that Inductor makes of
vLLM's own layers."""

import pickle
from collections.abc import Callable, Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm.config import VllmConfig, set_current_vllm_config

from vllm_fp8ext.kernels.testing.kernel_cases import same

M, H, G, D = 5, 8, 2, 128
EPSILON = 1e-6


class Model(NamedTuple):
    """What an attention layer does before attention, as vLLM's Qwen3 does it."""

    heads: Callable[..., Any]
    inputs: tuple[Tensor, ...]


def model(
    *,
    normed: tuple[str, ...] = ("query", "key"),
    scale: Tensor | None = None,
    size: int = D,
    rotary: int | None = None,
    neox: bool = True,
    shifted: bool = False,
    read_twice: bool = False,
    by_rows: bool = False,
    by_head: bool = False,
    plus_one: bool = False,
    epsilons: tuple[float, float] = (EPSILON, EPSILON),
    variance: int | None = None,
    factor: float | None = None,
    apart: str = "",
    sections: tuple[int, int, int] | None = None,
    interleaved: bool = False,
) -> Model:
    """`apart`: an input whose values do not lie side by side. `sections`: of the columns that a token's three positions turn,
    as vLLM's multimodal models have it."""
    import vllm.ir.ops  # noqa: F401  its operators
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    rotary = rotary or size
    with set_current_vllm_config(VllmConfig()):
        table = RotaryEmbedding(size, rotary, 64, 1e4, neox, torch.bfloat16).cos_sin_cache
        if sections is not None:
            turn = MRotaryEmbedding(size, rotary, 64, 1e4, neox, torch.bfloat16, list(sections), interleaved)
        one = scale is None or scale.numel() == 1
        quantize = QuantFP8(
            static=True, group_shape=GroupShape.PER_TENSOR if one else GroupShape(-1, H // G * size)
        )
    noise = torch.Generator().manual_seed(0)
    positions = torch.randint(60, (M,), generator=noise)
    if sections is not None:  # rows of a wider buffer, as vLLM has them
        positions = torch.randint(60, (3, M + 8), generator=noise)[:, :M]
    norms = (torch.randn(H + G, size, generator=noise) * 0.2 + 1).bfloat16()
    named = {
        "qkv": torch.randn(M, (H + 2 * G) * size, generator=noise).bfloat16(),
        "positions": positions,
        "table": table,
        "query": norms[:H] if by_head else norms[0],
        "key": norms[H:] if by_head else norms[1],
        **({} if scale is None else {"scale": scale}),
    }
    if apart:
        named[apart] = torch.stack((named[apart], named[apart] * 3), -1)[..., 0]

    def heads(qkv: Tensor, positions: Tensor, table: Tensor, q_norm: Tensor, k_norm: Tensor, *scales: Tensor):
        query, key, value = qkv.split([H * size, G * size, G * size], dim=-1)

        def normalized(name: str, part: Tensor, weight: Tensor, epsilon: float) -> Tensor:
            if name not in normed:
                return part
            weight = weight + 1 if plus_one else weight
            rows = part.view(part.shape[0], -1, size)
            return torch.ops.vllm_ir.rms_norm(rows, weight, epsilon, variance).view(part.shape)

        query = normalized("query", query, q_norm, epsilons[0])
        key = normalized("key", key, k_norm, epsilons[1])
        places = positions + 1 if shifted else positions
        table = table if factor is None else table * factor
        if sections is None:
            query, key = RotaryEmbedding.forward_static(places, query, key, size, rotary, table, neox)
        else:
            query, key = turn.forward_native(places, query, key)
        plain = query
        if scales:
            query, _ = quantize.forward_native(query.view(-1, size) if by_rows else query, scales[0])
        result = query.view(-1, H, size), key.view(-1, G, size), value.view(-1, G, size)
        return (*result, plain * 2) if read_twice else result

    return Model(heads, tuple(named.values()))


def joined(layer: Model, *, wanted: bool = True) -> tuple[int, Any]:
    """How many of our operators are in the compiled graph, and what it computes."""
    from torch._inductor.compile_fx import compile_fx

    from vllm_fp8ext.compat.graphs.fusion import PASS, JoinLinear

    counts = []

    class Counted(JoinLinear):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            graph.lint()
            counts.append(sum(str(node.target) == "fp8ext.norm_rope.default" for node in graph.nodes))

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        options = {
            PASS: Counted(norm_rope=wanted),
            "fx_graph_cache": False,
            "enable_auto_functionalized_v2": False,
        }
        return compile_fx(module, inputs, config_patches=options)

    torch._dynamo.reset()
    for tokens in layer.inputs[:2]:
        torch._dynamo.mark_dynamic(tokens, 0 if tokens is layer.inputs[0] else tokens.dim() - 1)
    result = torch.compile(layer.heads, fullgraph=True, backend=backend)(*layer.inputs)
    return sum(counts), result


SCALES = {
    "16 bits": None,
    "one scale": torch.tensor(0.02),
    "a scale for each head": torch.tensor([0.02, 0.05]),
}


IN_FULL = {
    *(("norms", "one scale"), ("no norms", "16 bits"), ("no norms", "one scale")),
    ("no norms", "a scale for each head"),
    *("read_twice", "by_rows"),
    *("part of a head", "places apart", "heads of another size", "a norm's weight apart", "other epsilons"),
    *("Qwen2.5-VL", "three positions of part of a head", "three positions made in the graph"),
    *("a norm's weight made in the graph", "one norm", "a norm of half a head", "a table apart"),
    *("places made in the graph", "another table"),
}
"""Cases that `make test` leaves out: the graph of each is compiled, which takes a second or two."""


def cases(names: Iterable[Any]) -> list[Any]:
    """Return values of a parameter, those in `IN_FULL` with that mark."""
    return [pytest.param(name, marks=pytest.mark.full if name in IN_FULL else ()) for name in names]


@pytest.mark.parametrize("case", cases(product(("norms", "no norms"), SCALES)), ids="-".join)
def test_a_layers_heads(case: tuple[str, str]):
    norms, scale = case
    layer = model(normed=("query", "key") if norms == "norms" else (), scale=SCALES[scale])
    count, outputs = joined(layer)
    assert count == 1
    for mine, expected in zip(outputs, layer.heads(*layer.inputs), strict=True):
        assert (mine.dtype, mine.shape, mine.is_contiguous()) == (
            expected.dtype,
            expected.shape,
            expected.is_contiguous(),
        )
        assert apart(mine, expected) < 0.01


MROPE: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL": {"sections": (16, 24, 24), "normed": ()},
    "Qwen3-VL": {"sections": (24, 20, 20), "interleaved": True},
}


@pytest.mark.parametrize("family", cases(MROPE))
def test_heads_that_three_positions_turn(family: str):
    """Compiled with the join they are, bit for bit, what Inductor makes of vLLM's own layers."""
    layer = model(scale=SCALES["one scale"], **MROPE[family])
    count, outputs = joined(layer)
    assert count == 1
    count, plain = joined(layer, wanted=False)
    assert count == 0
    assert [same(*pair) for pair in zip(outputs, plain, strict=True)] == [True] * 3


def apart(actual: Tensor, expected: Tensor) -> float:
    """Of the whole: eager rotary embedding rounds twice more, which shows where its two terms cancel."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("way", cases(["read_twice", "by_rows", "apart"]))
def test_queries_that_are_quantized_after(way: str):
    """Another reads them; rows of them are quantized; or the scales do not lie side by side."""
    scale = SCALES["a scale for each head" if way == "apart" else "one scale"]
    layer = model(scale=scale, **{way: "scale" if way == "apart" else True})
    count, outputs = joined(layer)
    assert count == 1
    expected = layer.heads(*layer.inputs)
    assert [apart(*pair) < 0.01 for pair in zip(outputs, expected, strict=True)] == [True] * len(expected)


STAY: dict[str, dict[str, Any]] = {
    "part of a head": {"rotary": D // 2},
    "pairs side by side": {"neox": False},
    "places made in the graph": {"shifted": True},
    "places apart": {"apart": "positions"},
    "heads of another size": {"size": 96},
    "a norm for each head": {"by_head": True},
    "a norm's weight apart": {"apart": "key"},
    "a norm's weight made in the graph": {"plus_one": True},
    "other epsilons": {"epsilons": (1e-6, 1e-5)},
    "one norm": {"normed": ("query",)},
    "a norm of half a head": {"variance": D // 2},
    "another table": {"factor": 0.5},
    "a table apart": {"apart": "table"},
    "three positions of part of a head": {"sections": (12, 10, 10), "interleaved": True, "rotary": D // 2},
    "three positions made in the graph": {"sections": (16, 24, 24), "shifted": True},
}


@pytest.mark.parametrize("why", cases(STAY))
def test_layers_that_stay(why: str):
    layer = model(**STAY[why])
    count, outputs = joined(layer)
    assert count == 0
    assert [apart(*pair) < 0.01 for pair in zip(outputs, layer.heads(*layer.inputs), strict=True)] == [
        True
    ] * 3


def test_a_layer_stays_where_that_is_set():
    from vllm_fp8ext.compat.graphs import fusion

    assert joined(model(), wanted=False)[0] == 0
    keys = set()
    for wanted in (True, False):
        compilation = SimpleNamespace(inductor_compile_config={}, custom_ops=[])
        fusion.configure(
            SimpleNamespace(compilation_config=compilation, additional_config=None), norm_rope=wanted
        )
        result = compilation.inductor_compile_config[fusion.PASS]
        assert result.norm_rope is wanted
        keys.add(pickle.loads(pickle.dumps(result)).uuid())
    assert len(keys) == 2

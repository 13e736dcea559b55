# SPDX-License-Identifier: Apache-2.0
"""Which layers and steps go to our own attention kernel. That it is right there, `tests/gpu` shows."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention import ChunkedLocalAttention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from vllm_fp8ext.compat.graphs import fusion_attention
from vllm_fp8ext.compat.speed import decode_attention, mixed_step_metadata
from vllm_fp8ext.kernels.attention.decode_attention import AttentionKind, is_kernel_aligned
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE
from vllm_fp8ext.kernels.testing import kernel_cases


def layer(**changed: Any) -> Any:
    impl = {
        "vllm_flash_attn_version": 3,
        "num_queries_per_kv": 4,
        "sliding_window": (-1, -1),
        "logits_soft_cap": 0,
        "alibi_slopes": None,
        "sinks": None,
        "attn_type": AttentionType.DECODER,
        "batch_invariant_enabled": False,
        "scale": 0.5,
        "forward": None,
        "do_kv_cache_update": None,
    }
    own = {
        "attn_backend": SimpleNamespace(get_name=lambda: changed.get("backend", "FLASH_ATTN")),
        "head_size": 128,
        "head_size_v": 128,
        "kv_sharing_target_layer_name": None,
        "query_quant": object(),
        "kv_cache_dtype": "fp8",
        "kv_cache_torch_dtype": torch.uint8,
        "dtype": torch.bfloat16,
        "kv_cache": "cache",
        "layer_name": "layer",
    }
    own |= {f"_{name}_scale": name for name in "qkv"}
    known = {name: changed.get(name, value) for name, value in impl.items()}
    return SimpleNamespace(
        **{name: changed.get(name, value) for name, value in own.items()}, impl=SimpleNamespace(**known)
    )


PLAIN = {"kv_cache_dtype": "auto", "kv_cache_torch_dtype": torch.bfloat16, "query_quant": None}
"""A cache in 16 bits."""


def config(context_parallel: int = 1, ubatching: bool = False, connector: object = None) -> Any:
    parallel = SimpleNamespace(decode_context_parallel_size=context_parallel, use_ubatching=ubatching)
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=connector)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"backend": "TRITON_ATTN"}, "attention by TRITON_ATTN"),
        ({"vllm_flash_attn_version": 2}, "FlashAttention 2"),
        ({"head_size": 80, "head_size_v": 80}, "heads of 80"),
        ({"head_size": 512, "head_size_v": 512}, "heads of 512"),
        ({"head_size_v": 192}, "heads of 128 with values of 192"),
        ({"num_queries_per_kv": 17}, "17 query heads to a KV head"),
        ({"sliding_window": (127, 127)}, "a window of 127 tokens behind one"),
        ({"alibi_slopes": torch.ones(4)}, "ALiBi"),
        ({"sinks": torch.ones(4)}, "sinks in other dtypes than BF16"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, f"{AttentionType.ENCODER_ONLY} attention"),
        ({"kv_sharing_target_layer_name": "another"}, "shared K and V"),
        ({"query_quant": None}, "queries in 16 bits"),
        ({"dtype": torch.float16}, "outputs in torch.float16"),
        ({**PLAIN, "kv_cache_torch_dtype": torch.float16}, "K and V in torch.float16"),
        ({"batch_invariant_enabled": True}, "VLLM_BATCH_INVARIANT"),
    ],
)
def test_layers_that_stay_with_vllms_attention(changed: dict[str, Any], reason: str) -> None:
    assert decode_attention.unsupported_reason(layer(**changed), config()) == reason


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({}, AttentionKind()),
        ({"head_size": 64, "head_size_v": 64}, AttentionKind(64)),
        ({"head_size": 96, "head_size_v": 96, "sliding_window": (2046, 0)}, AttentionKind(96, window=2047)),
        (
            {"head_size": 256, "head_size_v": 256, "sliding_window": (4095, 0), "logits_soft_cap": 50.0},
            AttentionKind(256, window=4096, soft_cap=50.0),
        ),
        (
            {"sinks": torch.ones(4).bfloat16(), "sliding_window": (127, 0)},
            AttentionKind(128, 128, sinks=True),
        ),
    ],
    ids=["plain", "Llama-3.2-1B", "Phi-3", "Gemma 2", "sinks"],
)
def test_layers_that_go_to_the_kernel(changed: dict[str, Any], kind: AttentionKind) -> None:
    given = layer(**changed)
    assert decode_attention.unsupported_reason(given, config()) is None
    assert decode_attention.kind_of(given) == kind


def test_attention_over_chunks_stays_with_vllms() -> None:
    """Its steps have a request for each chunk that new tokens fall into."""
    given: Any = ChunkedLocalAttention.__new__(ChunkedLocalAttention)
    vars(given).update(vars(layer()))
    assert decode_attention.unsupported_reason(given, config()) == "attention over chunks"


def test_parallelism_that_the_kernel_does_not_know() -> None:
    assert decode_attention.unsupported_reason(layer(), config()) is None
    assert decode_attention.unsupported_reason(layer(**PLAIN), config()) is None
    assert (
        decode_attention.unsupported_reason(layer(), config(context_parallel=2))
        == "decode context parallelism"
    )
    assert decode_attention.unsupported_reason(layer(), config(ubatching=True)) == "microbatches"
    assert decode_attention.unsupported_reason(layer(), config(connector=object())) == "a KV connector"


def test_what_is_not_for_the_kernel_is_left_as_it_is() -> None:
    given = layer(head_size=80)
    before = dict(vars(given.impl))
    decode_attention.attach(given, config(), {})
    assert vars(given.impl) == before


def test_layers_of_one_engine_share_a_kernel_and_those_of_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its scratch memory is the engine's: another one may sleep, or run at the same time."""
    used: list[Any] = []
    monkeypatch.setattr(
        decode_attention,
        "DecodeAttention",
        lambda *shape, kind: SimpleNamespace(shape=shape, kind=kind, quantizes=kind.head_size != 96),
    )
    monkeypatch.setattr(
        decode_attention, "replace_attention", lambda layer, kernel, form: used.append((kernel, form))
    )
    monkeypatch.setattr(decode_attention.decode_prefill_split, "install", lambda: None)
    given = layer(**PLAIN)
    vars(given).update(num_heads=32, num_kv_heads=8, _k_scale=torch.ones(1))
    of = config()
    of.scheduler_config = SimpleNamespace(max_num_seqs=4)
    of.compilation_config = SimpleNamespace(max_cudagraph_capture_size=8)
    engines: list[decode_attention.Kernels] = [{}, {}]
    for kernels in engines:
        for _ in range(2):
            assert decode_attention.attach(given, of, kernels, "fp32")
    first, second, third, fourth = (kernel for kernel, _ in used)
    assert first is second
    assert third is fourth
    assert first is not third
    assert first.shape == (32, 8, 8, torch.device("cpu"), torch.bfloat16)
    given.impl.sliding_window = 127, 0
    decode_attention.attach(given, of, engines[0], "fp32")
    assert used[-1][0] is not first, "layers with a window have another"
    assert not decode_attention.attach(given, of, engines[0], "fp32", every=False)
    assert len(used) == 5, "windows have to be asked for"
    vars(given).update(head_size=96, head_size_v=96)
    assert not decode_attention.attach(given, of, engines[0], "fp32")
    assert [form for _, form in used] == ["fp32"] * 5 + [None], "of which outputs can't be quantized"


STEP = {
    "max_query_len": 1,
    "num_actual_tokens": 2,
    "seq_lens": torch.tensor([5, 9]),
    "causal": True,
    "mm_prefix_query_range_tensor": None,
    "rswa_prefix_lens": None,
    "block_table": "table",
    "slot_mapping": torch.tensor([4, 8, -1]),
}


@pytest.mark.parametrize(
    ("changed", "own"),
    [
        ({}, True),
        ({"max_query_len": 2}, False),
        ({"max_query_len": 2, "fp8ext_single": (1, None), "causal": False}, False),
        ({"num_actual_tokens": 1}, False),
        ({"causal": False}, False),
        ({"mm_prefix_query_range_tensor": torch.zeros(1)}, False),
        ({"rswa_prefix_lens": torch.zeros(1)}, False),
        (None, False),
    ],
    ids=str,
)
def test_steps_that_decode_alone_go_to_the_kernel(changed: dict[str, Any] | None, own: bool) -> None:
    calls: list[str] = []
    given = layer(sinks="sinks")
    given.impl.forward = lambda *_: calls.append("vLLM attends") or "theirs"
    asked: list[Any] = []
    decode_attention.replace_attention(given, lambda *args: asked.append(args))  # type: ignore[arg-type]  # what it is called with
    metadata = None if changed is None else SimpleNamespace(**STEP | changed)
    query, key, value, out = (torch.arange(4.0).view(4, 1, 1) for _ in range(4))
    result = given.impl.forward(given, query, key, value, "cache", metadata, out)
    if not own:
        assert calls == ["vLLM attends"]
        assert result == "theirs"
        assert not asked
        return
    assert not calls
    assert result is out
    (((q, k, v, cache, table, lengths, slots, scales, scale, sinks), written),) = asked
    assert [len(part) for part in (q, k, v, written)] == [2] * 4
    assert (cache, table, scales, scale, sinks) == ("cache", "table", ("q", "k", "v"), 0.5, "sinks")
    assert lengths is metadata.seq_lens
    assert slots is metadata.slot_mapping


@pytest.mark.parametrize(
    ("shape", "strides", "lies"),
    [
        ((4, 8, 128), (1024, 128, 1), True),
        ((4, 8, 128), (3072, 128, 1), True),
        ((4, 8, 128), (1028, 128, 1), False),
        ((1, 8, 128), (1028, 128, 1), True),
        ((4, 1, 128), (1024, 77, 1), True),
        ((4, 8, 128), (2048, 256, 1), False),
        ((4, 8, 128), (1024, 1, 8), False),
    ],
)
def test_which_heads_lie_as_they_are_read(
    shape: tuple[int, ...], strides: tuple[int, ...], lies: bool
) -> None:
    """Torch gives a dimension of one any stride, also a contiguous one."""
    part = torch.empty(1 << 14, dtype=torch.bfloat16).as_strided(shape, strides)
    assert is_kernel_aligned(part) == lies


def test_queries_that_are_not_quantized_have_no_scale() -> None:
    """Though a checkpoint may bring one."""
    asked: list[Any] = []
    given = layer(**PLAIN)
    decode_attention.replace_attention(given, lambda *args: asked.append(args))  # type: ignore[arg-type]  # what it is called with
    given.impl.forward(
        given, *[torch.zeros(2, 1, 1)] * 3, "cache", SimpleNamespace(**STEP), torch.zeros(2, 1, 1)
    )
    assert asked[0][0].scales == ("k", "k", "v")


def test_in_steps_with_prompts_requests_with_one_token_go_to_the_kernel(
    mixed: FlashAttentionMetadata,
) -> None:
    """FlashAttention has the others, whose tokens stay where they are; vLLM has cached all of them."""
    calls: list[Any] = []
    given, metadata = layer(), mixed
    given.impl.forward = lambda *args: calls.append(args)
    decode_attention.replace_attention(given, lambda *args: calls.append(args))  # type: ignore[arg-type]  # what it is called with
    query, key, value, out = (torch.arange(8.0).view(8, 1, 1) for _ in range(4))
    for _ in range(2):  # of two layers
        assert given.impl.forward(given, query, key, value, "cache", metadata, out) is out
    (*shown, prompts, written), (step, rows), (*_, again, _), _ = calls
    assert all(one is other for one, other in zip(shown, (given, query, key, value, "cache"), strict=True))
    assert written is out
    assert again is prompts
    assert prompts.query_start_loc.tolist() == [2, 6, 7]
    assert prompts.seq_lens.tolist() == [4, 40]
    assert prompts.block_table.tolist() == [[4, 5], [6, 7]]
    assert prompts.scheduler_metadata.tolist() == [1, 1, 1]
    assert (prompts.num_actual_tokens, prompts.max_query_len, prompts.max_seq_len) == (7, 4, 40)
    assert metadata.seq_lens.tolist() == [33, 1, 4, 40]
    assert step.lengths_R.tolist() == [33, 1]
    assert step.slots_R is None
    assert [len(part) for part in (step.query_RHD, step.key_RGD, step.value_RGD, rows)] == [2] * 4


@pytest.fixture
def held(mixed: FlashAttentionMetadata) -> FlashAttentionMetadata:
    """Such a step, as one graph holds it."""
    result = dataclasses.replace(mixed)
    prompts = dataclasses.replace(mixed, query_start_loc=torch.tensor([2, 2, 2, 6, 7]))
    setattr(
        result, mixed_step_metadata._APART, mixed_step_metadata.Apart(torch.tensor([33, 1, 0, 0]), prompts)
    )
    return result


@pytest.mark.parametrize("form", [None, "fp32"])
def test_in_a_graph_of_a_whole_step_both_attend(form: Any, held: FlashAttentionMetadata) -> None:
    """The kernel first: what it makes of requests that are FlashAttention's is written over."""
    if form:
        pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    given, asked = layer(), []
    made = kernel_cases.activations(8, 256, "cpu").view(8, 2, 128)

    def theirs(*args: Any) -> None:
        asked.append(args)
        args[6][2:] = made[2:]  # and what is padding

    def ours(step: Any, rows: torch.Tensor) -> None:
        asked.append(step)
        rows[:] = 0
        rows[:2] = made[:2]

    given.impl.forward = theirs
    decode_attention.replace_attention(given, ours, form)  # type: ignore[arg-type]  # what it is called with
    query, key, value = (torch.arange(8.0).view(8, 1, 1) for _ in range(3))
    out = torch.zeros(8, 2, 128, dtype=FP8_DTYPE if form else torch.bfloat16)
    scales = torch.zeros(2, 8).t() if form else None
    result = given.impl.forward(given, query, key, value, "cache", held, out, output_block_scale=scales)
    assert result is out
    step, (*shown, told, written) = asked
    assert step.lengths_R.tolist() == [33, 1, 0, 0]
    assert step.slots_R is None
    assert [len(part) for part in (step.query_RHD, step.key_RGD, step.value_RGD)] == [4] * 3
    assert all(one is other for one, other in zip(shown, (given, query, key, value, "cache"), strict=True))
    assert told.query_start_loc.tolist() == [2, 2, 2, 6, 7]
    if form is None:
        assert written is out
        assert torch.equal(out[:7], made[:7])
        return
    codes, by = reference.quantize_activation(made[:7].flatten(1))
    assert kernel_cases.same(out[:7].flatten(1), codes)
    assert torch.equal(scales[:7], by)  # type: ignore[index]  # there are some


@pytest.mark.parametrize("without", ["k and v", "a plain mask"])
def test_in_a_graph_of_a_whole_step_flash_attention_has_what_the_kernel_does_not_take(
    without: str, held: FlashAttentionMetadata
) -> None:
    given, calls = layer(), []
    given.impl.forward = lambda *args: calls.append(args) or "theirs"
    decode_attention.replace_attention(given, lambda *_: None)  # type: ignore[arg-type]  # is not called
    query, new = torch.zeros(8, 1, 1), None if without == "k and v" else torch.zeros(8, 1, 1)
    if new is not None:
        held.causal = False
    assert given.impl.forward(given, query, new, new, "cache", held, "out") == "theirs"
    ((*_, told, _),) = calls
    assert told is held


@pytest.mark.parametrize("alone", [True, False])
def test_a_layer_that_is_run_again_without_k_and_v(alone: bool, mixed: FlashAttentionMetadata) -> None:
    """Its tokens are cached: FlashAttention needs nothing else."""
    metadata: Any = SimpleNamespace(**STEP) if alone else mixed
    given, calls = layer(), []
    given.impl.forward = lambda *args: calls.append(args) or "theirs"
    decode_attention.replace_attention(given, lambda *_: None)  # type: ignore[arg-type]  # is not called
    query = torch.zeros(8, 1, 1)
    assert given.impl.forward(given, query, None, None, "cache", metadata, "out") == "theirs"
    assert calls == [(given, query, None, None, "cache", metadata, "out")]


def test_quantized_outputs_of_requests_that_decode() -> None:
    """The kernel makes them, of as many as there are."""
    given, asked = layer(), []
    decode_attention.replace_attention(given, lambda *args: asked.append(args), "pow2")  # type: ignore[arg-type]  # what it is called with
    query, key, value = (torch.arange(4.0).view(4, 1, 1) for _ in range(3))
    codes, scales = torch.zeros(4, 2, 128, dtype=FP8_DTYPE), torch.zeros(2, 4).t()
    out = given.impl.forward(
        *(given, query, key, value, "cache", SimpleNamespace(**STEP), codes), output_block_scale=scales
    )
    assert out is codes
    ((_, room, form),) = asked
    assert (room.codes.shape, room.scales.shape, room.scales.stride(), form) == (
        (2, 256),
        (2, 2),
        (1, 4),
        "pow2",
    )
    assert room.codes.data_ptr() == codes.data_ptr()


@pytest.mark.parametrize("mixes", [False, True])
def test_quantized_outputs_of_prompts(mixes: bool, mixed: FlashAttentionMetadata) -> None:
    """FlashAttention writes BF16, which is quantized then, beside what the kernel makes of requests that decode."""
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    given, asked, written = layer(), [], kernel_cases.activations(9, 256, "cpu").view(9, 2, 128)
    given.impl.forward = lambda *args: args[6].copy_(written)
    decode_attention.replace_attention(given, lambda *args: asked.append(args), "fp32")  # type: ignore[arg-type]  # what it is called with
    query, key, value = (torch.arange(9.0).view(9, 1, 1) for _ in range(3))
    codes, scales = torch.zeros(9, 2, 128, dtype=FP8_DTYPE), torch.zeros(2, 12).t()[:9]
    metadata: Any = mixed if mixes else None
    out = given.impl.forward(*(given, query, key, value, "cache", metadata, codes), output_block_scale=scales)
    assert out is codes
    first = 2 if mixes else 0
    expected = reference.quantize_activation(written.flatten(1))
    assert kernel_cases.same(codes.flatten(1)[first:], expected[0][first:])
    assert torch.equal(scales[first:], expected[1][first:])
    assert [len(room.codes) for _, room, _ in asked] == [2] * mixes


@pytest.mark.parametrize("form", [None, "fp32"])
def test_one_scale_for_all_outputs_is_vllms_to_refuse(form: Any) -> None:
    given, calls = layer(), []
    given.impl.forward = lambda *args: calls.append(args) or "theirs"
    decode_attention.replace_attention(given, lambda *_: None, form)  # type: ignore[arg-type]  # is not called
    step = (given, *[torch.zeros(2, 1, 1)] * 3, "cache", SimpleNamespace(**STEP), "out")
    assert given.impl.forward(*step, "scale") == "theirs"
    assert calls[0][6:] == ("out", "scale", None)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("taken", [[True, True], [True, False], []])
def test_graphs_are_joined_where_every_layer_is_ours(
    wanted: bool, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = iter(taken), []
    monkeypatch.setattr(decode_attention, "Attention", torch.nn.Linear)
    monkeypatch.setattr(decode_attention, "attach", lambda *_, **__: next(answers))
    monkeypatch.setattr(fusion_attention, "configure", lambda *args: asked.append(args))
    of = SimpleNamespace(additional_config={"fp8ext": {"kernels": {"quantized_attention": wanted}}})
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in taken)
    copy = model.vllm_config = SimpleNamespace()  # type: ignore[assignment]  # as vLLM keeps it
    decode_attention.attach_all(model, of)
    form = "fp32" if wanted and taken == [True, True] else None
    assert asked == [(of, form), (copy, form)]


def test_a_graph_that_holds_attention_is_for_any_number_of_them(
    mixed: FlashAttentionMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some the batches that vLLM captures begin with requests of one token."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    calls: list[Any] = []
    given, metadata = layer(), mixed
    given.impl.forward = lambda *args: calls.append(args) or "theirs"
    decode_attention.replace_attention(given, lambda *_: None)  # type: ignore[arg-type]  # is not called
    assert given.impl.forward(given, *[torch.zeros(8, 1, 1)] * 3, "cache", metadata, "out") == "theirs"
    assert calls[0][5] is metadata


@pytest.mark.parametrize(
    ("changed", "mode", "slots", "theirs"),
    [
        ({}, CUDAGraphMode.NONE, None, False),
        ({}, CUDAGraphMode.FULL, None, False),
        ({}, CUDAGraphMode.PIECEWISE, None, True),
        ({}, CUDAGraphMode.FULL, torch.tensor([4, 8, -1]), True),
        ({"max_query_len": 2}, CUDAGraphMode.NONE, None, True),
        (None, CUDAGraphMode.NONE, None, True),
    ],
    ids=["eager", "graph", "piece", "other tokens", "prefill", "no metadata"],
)
def test_the_kernel_caches_what_it_attends_to(
    changed: dict[str, Any] | None, mode: CUDAGraphMode, slots: torch.Tensor | None, theirs: bool
) -> None:
    """A piece of a graph may be replayed for other steps than it was captured in: vLLM caches there. So it does with tokens
    that come on another way than a step's."""
    given = layer()
    asked: list[Any] = []
    given.impl.do_kv_cache_update = lambda *args: asked.append(args)
    decode_attention.replace_attention(given, lambda *_: None)  # type: ignore[arg-type]  # is not called
    metadata = None if changed is None else SimpleNamespace(**STEP | changed)
    slots = STEP["slot_mapping"] if slots is None else slots
    step = (given, "key", "value", "cache", slots)
    context = ForwardContext({"layer": given}, {"layer": metadata}, {}, cudagraph_runtime_mode=mode)  # type: ignore[dict-item]  # what is looked at
    with override_forward_context(context):
        given.impl.do_kv_cache_update(*step)
    assert asked == [step] * theirs
    asked.clear()
    given.impl.do_kv_cache_update(*step)
    assert asked == [step], "outside of a step"

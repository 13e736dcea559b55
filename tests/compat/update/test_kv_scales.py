# SPDX-License-Identifier: Apache-2.0
"""The FP8 KV cache of real models on the CPU: what is refused at start, the first scales, and prompts in one pass."""

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_python.processes import run

from vllm_fp8ext.compat.update.kv_scales import owners_of_kv
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.attention.kv_cache import next_scales
from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.layers.kv_cache_method import KvCacheMethod

REFUSED: dict[str, tuple[str, Any, str]] = {
    "no policy": ("fp8", {}, "needs a choice of K and V scales"),
    "static without scales": (
        "fp8",
        {"kv_scales": "static"},
        "the checkpoint has no K and V scales for model.layers.0",
    ),
    "a scale for each head": (
        "fp8",
        {"kv_scales": {"policy": "calibrate", "granularity": "head"}},
        "expected attention by FLASH_ATTN, found CPU_ATTN",
    ),
    "no updates": (
        "fp8",
        {"kv_scales": "calibrate", "staging": "none"},
        "expected staging shadow or inplace, or kv_scales static",
    ),
    "other codes": ("fp8_per_token_head", {"kv_scales": "calibrate"}, "found fp8_per_token_head"),
}
TAKEN: dict[str, tuple[str, Any]] = {
    "calibrate": ("fp8", {"kv_scales": "calibrate"}),
    "a default": ("fp8_e4m3", {"kv_scales": {"policy": "static", "default": 0.1}}),
    "static without updates": (
        "fp8",
        {"kv_scales": {"policy": "static", "default": 0.5}, "staging": "none"},
    ),
    "16 bits": ("auto", {}),
    "a layer in 16 bits": ("fp8", {"kv_scales": "calibrate"}),
}
OPTIONS = {"a layer in 16 bits": {"kv_cache_dtype_skip_layers": ["1"]}}
LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(3)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kv")
    cases = {name: [*case[:2], OPTIONS.get(name, {})] for name, case in (REFUSED | TAKEN).items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    script, out = Path(__file__).with_name("kv_scales_scenario.py"), folder / "answers.json"
    done = run(
        [sys.executable, "-P", str(script), str(folder / "cases.json"), str(out)],
        env={**os.environ, "VLLM_PLUGINS": "fp8ext"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(out.read_text())
    return loaded


@pytest.mark.parametrize("case", REFUSED)
def test_refused(answers: dict[str, Any], case: str) -> None:
    assert isinstance(answers[case], str), answers[case]
    assert answers[case].startswith("ConfigError")
    assert REFUSED[case][2] in answers[case]


def test_taken(answers: dict[str, Any]) -> None:
    tenth = float(torch.tensor(0.1))
    assert answers["a default"]["static"] == [[tenth] * 3] * 3
    assert answers["static without updates"]["static"] == [[0.5] * 3] * 3
    assert answers["16 bits"]["static"] == []


def test_the_first_scales_are_in_every_copy(answers: dict[str, Any]) -> None:
    result = answers["calibrate"]["calibrated"]
    assert result["told"]["amax"] == {
        layer: {kind: [value] for kind, value in zip("qkv", amax, strict=True)}
        for layer, amax in result["amax"].items()
    }
    for layer in LAYERS:
        q, k, v = next_scales(torch.tensor(result["amax"][layer]), torch.ones(3)).tolist()
        assert result["scales"][layer] == {"q": [q], "k": [k], "v": [v]}
        assert result["copies"][layer] == [k, k, k, v, v, v, q, q]
        for fit in result["told"]["fits"][layer].values():
            assert (fit["elements"], fit["saturated"]) == (104 * 2 * 64, 0)
            assert 0.01 < math.sqrt(fit["squared_error"] / fit["squared_norm"]) < 2.0**-4
    assert (result["told"]["source"], result["told"]["tokens"]) == ("update", 104)
    assert not result["kept"], "samples of K and V give their memory back"


def test_a_layer_that_caches_in_16_bits_has_no_scales(answers: dict[str, Any]) -> None:
    result = answers["a layer in 16 bits"]["calibrated"]
    assert list(result["scales"]) == list(result["told"]["fits"]) == [LAYERS[0], LAYERS[2]]
    whole = answers["calibrate"]["calibrated"]["scales"]
    assert result["scales"] == {layer: whole[layer] for layer in result["scales"]}


def test_heads_that_are_not_the_models_are_refused(answers: dict[str, Any]) -> None:
    assert answers["calibrate"]["heads"].endswith("expected 3 of 3 KV heads on each of 1 ranks, found 2")


def test_prompts_in_one_pass_do_not_see_each_other(answers: dict[str, Any]) -> None:
    """The first layer's K and V are of tokens alone; later ones show what was attended to. Sums of other lengths may be
    rounded otherwise."""
    result = answers["calibrate"]["packed"]
    assert result["shapes"] == {layer: [[104, 4, 64], [104, 2, 64], [104, 2, 64]] for layer in LAYERS}
    assert max(map(max, result["packed"].values())) < 1e-3
    assert min(map(min, (result["mixed"][layer] for layer in LAYERS[1:]))) > 0.1


def layer(backend: str, dtype: str = "fp8", heads: int = 4) -> Any:
    """An attention layer as far as scales are concerned."""
    module: Any = torch.nn.Module()
    module.layer_name, module.kv_cache_dtype, module.num_kv_heads = "here", dtype, heads
    module.attn_backend = SimpleNamespace(get_name=lambda: backend)
    for name in "qkv":
        module.register_buffer(f"_{name}_scale", torch.tensor(1.0))
    module._k_scale_cpu, module._v_scale_cpu = torch.tensor(1.0), torch.tensor(1.0)
    return module


def method(policy: str, **more: Any) -> KvCacheMethod:
    return KvCacheMethod(None, KvScaleSettings.model_validate({"policy": policy, **more}))


@pytest.mark.parametrize("policy", ["calibrate", "history", "provided"])
def test_attention_that_keeps_its_scales_is_static(policy: str) -> None:
    with pytest.raises(ConfigError, match="FLASHINFER keeps the scales"):
        method(policy).create_weights(layer("FLASHINFER"))
    method("static").create_weights(layer("FLASHINFER"))
    for backend in ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN"):
        method(policy).create_weights(layer(backend))


@pytest.mark.parametrize("backend", ["TRITON_ATTN", "FLASHINFER", "CPU_ATTN"])
def test_a_scale_for_each_head_needs_flash_attention(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"expected attention by FLASH_ATTN, found {backend}"):
        method("static", granularity="head").create_weights(layer(backend))


def loaded(chosen: KvCacheMethod, **values: float) -> Any:
    """A layer after its checkpoint had these scales."""
    module = layer("FLASH_ATTN")
    chosen.create_weights(module)
    for name, value in values.items():
        parameter = getattr(module, f"{name}_scale")
        parameter.weight_loader(parameter, torch.tensor(value))
    chosen.process_weights_after_loading(module)
    assert not [name for name, _ in module.named_parameters()], "placeholders are gone"
    assert [module._k_scale_cpu.item(), module._v_scale_cpu.item()] == [
        module._k_scale_float,
        module._v_scale_float,
    ]
    return module


@pytest.mark.parametrize(
    ("values", "default", "served"),
    [
        ({"k": 0.5, "v": 0.25, "q": 2.0}, None, [2.0, 0.5, 0.25]),
        ({"k": 0.5, "v": 0.25}, None, [0.5, 0.5, 0.25]),
        ({"k": 0.5}, None, [0.5, 0.5, 0.5]),
        ({"k": 0.5, "v": 0.25}, 8.0, [0.5, 0.5, 0.25]),
        ({"v": 0.25}, 8.0, [8.0, 8.0, 0.25]),
        ({}, 8.0, [8.0, 8.0, 8.0]),
    ],
)
def test_a_checkpoints_scales_come_before_the_default(
    values: dict[str, float], default: float | None, served: list[float]
) -> None:
    """One `kv_scale` of K and V arrives as K's."""
    module = loaded(method("static", default=default), **values)
    assert [module._q_scale.item(), module._k_scale.item(), module._v_scale.item()] == served
    assert [module._q_scale_float, module._k_scale_float, module._v_scale_float] == served


@pytest.mark.parametrize(
    "values", [{}, {"v": 0.5}, {"q": 0.5}, {"k": 0.0, "v": 1.0}, {"k": math.nan, "v": 1.0}]
)
def test_static_without_scales_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="the checkpoint has no K and V scales for here"):
        loaded(method("static"), **values)


def test_scales_of_heads_are_one_each_or_one_for_all() -> None:
    module = layer("FLASH_ATTN")
    chosen = method("static", granularity="head")
    chosen.create_weights(module)
    assert module.k_scale.shape == module.q_scale.shape == (4,)
    for name in "kv":
        parameter = getattr(module, f"{name}_scale")
        parameter.weight_loader(parameter, torch.tensor([0.5]))
    chosen.process_weights_after_loading(module)
    assert module._k_scale.tolist() == module._q_scale.tolist() == [0.5] * 4


def test_layers_that_read_others_k_and_v_are_rescaled_once() -> None:
    owner, reader = (
        SimpleNamespace(kv_sharing_target_layer_name=None),
        SimpleNamespace(kv_sharing_target_layer_name="a"),
    )
    assert owners_of_kv({"a": owner, "b": reader}, "calibrate") == {"a": owner}
    assert owners_of_kv({"a": owner}, "history") == {"a": owner}
    with pytest.raises(
        ConfigError, match="kv_scales history: 1 layers of this model read K and V of other layers"
    ):
        owners_of_kv({"a": owner, "b": reader}, "history")

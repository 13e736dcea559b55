# SPDX-License-Identifier: Apache-2.0
"""Settings: their defaults, and every mistake named at once with what is valid."""

import logging
from typing import Any

import pytest
from pydantic import ValidationError

from vllm_fp8ext import kernel_settings
from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernel_settings import OLD_KERNEL_SETTINGS, KernelSettings, ShapeSettings
from vllm_fp8ext.kv_settings import KvScaleSettings


def refused(section: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Settings.parse({"fp8ext": section})
    return str(caught.value)


@pytest.mark.parametrize("config", [None, {}, {"fp8ext": {}}, {"another plugin": {"scale_format": "int3"}}])
def test_everything_has_a_default(config: dict | None) -> None:
    assert Settings.parse(config) == Settings()
    assert Settings().scale_format == "fp32"
    assert Settings().staging == "shadow"
    assert Settings().lm_head == "bf16"
    assert Settings().allowed_dirs == ()


def test_what_json_can_say_is_taken() -> None:
    section = {
        "scale_format": "pow2",
        "ignore": ["*.o_proj", "model.layers.0.*"],
        "quantize": ["visual.*"],
        "features_off": ["norm_rope"],
        "staging": "none",
        "lm_head": "blockfp8",
        "kv_scales": {"policy": "static", "default": 1.0},
        "kernels": {
            "shapes": {
                "4096x12288": {"decode_tokens": 32, "gemm": "cutlass"},
                "*": {"decode_tokens": None, "gemm": None},
            },
            "experts": {"fused_tokens": 64, "triton_tokens": 0, "gemm": "deep_gemm"},
            "decode_attention": False,
            "norm_rope": False,
            "quantized_attention": False,
            "graph_tokens": 4096,
            "mixed_full_cudagraph": False,
            "decode_step_reuse": False,
            "slot_fast_path": False,
            "batch_invariant": False,
        },
        "serving": {"output_interval": 1, "stream_interval": 1, "flat_logprobs": False},
        "allowed_dirs": ["/data"],
        "spool_dir": "/tmp",
        "spool_bytes": 1 << 20,
        "upload_idle_seconds": 7,
        "busy_staging_rate": 1e9,
        "receive_bytes": 1 << 20,
        "deadline_seconds": 5,
        "update_lifetime_seconds": 90,
        "canary": {"prompts": [[1, 2, 3], [4, 5]], "max_perplexity": 20},
        "trusted_clients": ["127.0.0.1/32"],
        "draft_weights": "keep",
        "dummy_weights": "serve",
        "load_weights_end": "complete",
        "native_complete": True,
        "native_pickled_handles": True,
        "ready": "at_start",
        "native_update_seconds": 30.0,
        "pause_deadline_seconds": 5.0,
        "untried_layers": "refuse",
    }
    settings = Settings.parse({"fp8ext": section})
    assert settings.model_dump() == {
        **section,
        "ignore": tuple(section["ignore"]),
        "quantize": tuple(section["quantize"]),
        "features_off": ("norm_rope",),
        "allowed_dirs": ("/data",),
        "trusted_clients": ("127.0.0.1/32",),
        "canary": {"prompts": ((1, 2, 3), (4, 5)), "max_perplexity": 20.0},
        "kv_scales": KvScaleSettings(policy="static", default=1.0).model_dump(),
    }
    assert isinstance(settings.deadline_seconds, float)


def test_kernels_are_chosen_by_shape() -> None:
    settings = KernelSettings.model_validate(
        {"shapes": {"8x16": {"decode_tokens": 0}, "*": {"gemm": "triton"}}}
    )
    assert settings.route(8, 16) == ShapeSettings(decode_tokens=0)
    assert settings.route(16, 8) == ShapeSettings(gemm="triton")
    assert KernelSettings().route(8, 16) == ShapeSettings()
    for wrong in ("8", "8x", "0x8", "8x16x2", "**"):
        with pytest.raises(ValidationError):
            KernelSettings.model_validate({"shapes": {wrong: {}}})


@pytest.mark.parametrize("shape", [{"decode_tokens": 8}, {"gemm": "decode_gemm"}])
def test_batch_invariance_does_not_go_with_kernels_for_few_tokens(shape) -> None:
    section = {"kernels": {"shapes": {"8x16": shape}, "batch_invariant": True}}
    assert "batch_invariant leaves decode_gemm out, which shapes.8x16 asks for" in refused(section)
    Settings.parse({"fp8ext": {"kernels": {"shapes": {"8x16": {"gemm": "triton"}}, "batch_invariant": True}}})


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"fused_tokens": 8}, "batch_invariant leaves the kernel for few tokens out"),
        ({"gemm": "fused"}, "batch_invariant leaves the kernel for few tokens out"),
        ({"triton_tokens": 8}, "batch_invariant takes one kernel, where experts.triton_tokens asks for two"),
    ],
)
def test_batch_invariance_takes_one_kernel_of_experts(experts, message) -> None:
    assert message in refused({"kernels": {"experts": experts, "batch_invariant": True}})
    Settings.parse({"fp8ext": {"kernels": {"experts": {"gemm": "triton"}, "batch_invariant": True}}})


def test_an_unknown_key_is_named_with_the_known_ones() -> None:
    message = refused({"scale_fromat": "pow2"})
    assert '--additional-config "fp8ext" is not valid' in message
    assert "scale_fromat: unknown key" in message
    assert all(name in message for name in Settings.model_fields)
    assert all(
        name in refused({"kv_scales": {"policy": "calibrate", "marign": 1}})
        for name in KvScaleSettings.model_fields
    )


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("scale_format", "e8m0", "'fp32' or 'pow2'"),
        ("scale_format", None, "'fp32' or 'pow2'"),
        ("staging", "disk", "'shadow', 'inplace' or 'none'"),
        ("kv_scales", "dynamic", "'static'"),
        ("kv_scales", {"policy": "calibrate", "default": 1.0}, "static"),
        ("kv_scales", {"policy": "static", "default": -1.0}, "greater than 0"),
        ("kv_scales", {"policy": "static", "default": 1e-60}, "from 2**-126 to 2**118, found 1e-60"),
        ("kv_scales", {"policy": "calibrate", "tokens": 16, "prompts": [[1] * 9, [2] * 8]}, "found 17"),
        ("kv_scales", {"policy": "calibrate", "margin": 8.5}, "less than or equal to 8"),
        ("ignore", "*.o_proj", "tuple"),
        ("ignore", [1], "string"),
        ("allowed_dirs", {"/data": 1}, "tuple"),
        ("spool_dir", 3, "string"),
        ("spool_bytes", 1000, "65536"),
        ("spool_bytes", "1GiB", "integer"),
        ("spool_bytes", 2e9, "integer"),
        ("deadline_seconds", 0, "greater than 0"),
        ("deadline_seconds", -1.0, "greater than 0"),
        ("deadline_seconds", float("nan"), "greater than 0"),
        ("deadline_seconds", "60", "number"),
    ],
)
def test_a_wrong_value_is_named_with_the_valid_ones(key: str, value: object, valid: str) -> None:
    message = refused({key: value})
    [line] = message.splitlines()[1:]
    assert line.strip().startswith(key)
    assert valid in line
    assert "found" in line


def test_every_mistake_is_in_one_error() -> None:
    message = refused({"scale_format": "e8m0", "stagign": "none", "spool_bytes": 0})
    assert {line.split(":")[0].strip() for line in message.splitlines()[1:]} == {
        "scale_format",
        "stagign",
        "spool_bytes",
    }


@pytest.mark.parametrize("section", [None, [], "pow2", 3])
def test_a_section_that_is_no_object_is_refused(section: object) -> None:
    assert "expected an object" in refused(section)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().scale_format = "pow2"  # type: ignore[misc]  # what is tested


def test_every_field_says_what_it_is() -> None:
    """The docstring under each field is what the documentation shows."""
    import ast
    import inspect

    [definition] = [
        node for node in ast.parse(inspect.getsource(Settings)).body if isinstance(node, ast.ClassDef)
    ]
    body = definition.body
    fields = [index for index, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    assert [body[index].target.id for index in fields] == list(Settings.model_fields)
    assert all(isinstance(getattr(body[index + 1], "value", None), ast.Constant) for index in fields)


@pytest.mark.parametrize(
    ("section", "taken"),
    [
        ({}, True),
        ({"decode_attention": "all"}, True),
        ({"decode_attention": False}, False),
        ({"batch_invariant": True}, False),
    ],
)
def test_attention_of_our_own_is_taken_unless_batches_must_not_matter(
    section: dict[str, Any], taken: bool
) -> None:
    assert KernelSettings(**section).takes_decode_attention is taken


@pytest.mark.parametrize(("told", "invariant"), [(None, False), ("0", False), ("1", True)])
def test_what_vllm_is_told_of_batch_invariance_is_the_default(
    monkeypatch: pytest.MonkeyPatch, told: str | None, invariant: bool
) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if told is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", told)
    assert Settings.parse({}).kernels.batch_invariant is invariant
    section = {"fp8ext": {"kernels": {"batch_invariant": not invariant}}}
    assert Settings.parse(section).kernels.batch_invariant is not invariant


@pytest.mark.parametrize("name", ["fp8xt", "fp8_ext", "FP8EXT", "fpext8"])
def test_a_misspelt_section_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f'expected "fp8ext", found "{name}"'):
        Settings.parse({name: {"staging": "none"}})


@pytest.mark.parametrize("name", ["fp8", "other_plugin", "quant"])
def test_sections_of_others_are_left_to_them(name: str) -> None:
    assert Settings.parse({name: {"staging": "none"}}) == Settings()


def test_settings_outside_their_section_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'expected allowed_dirs, staging inside "fp8ext", as in .*found outside'
    ):
        Settings.parse({"staging": "none", "allowed_dirs": ["/a"], "of another plugin": 1})


@pytest.mark.parametrize("tokens", [-1, "all", True, 1.5])
def test_graphs_for_what_is_no_number_of_tokens(tokens: object) -> None:
    with pytest.raises(
        ConfigError,
        match=r'kernels\.graph_tokens: .*expected a number of tokens, 0 or more, or "auto", found',
    ):
        Settings.parse({"fp8ext": {"kernels": {"graph_tokens": tokens}}})
    assert Settings.parse({"fp8ext": {"kernels": {"graph_tokens": "auto"}}}).kernels.graph_tokens == "auto"


OLD_NAMES = [(f"kernels.{old}", f"kernels.{new}") for old, new in OLD_KERNEL_SETTINGS.items()]


def _section(path: str, value: object) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return {"fp8ext": value}


@pytest.mark.parametrize(("old", "new"), OLD_NAMES)
def test_an_old_name_of_a_setting_is_taken_and_told(
    old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in a process, however often settings are read."""
    kernel_settings._warn_of_old_name.cache_clear()
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        settings = [Settings.parse(_section(old, False)) for _ in range(2)]
    assert settings[0] == settings[1] == Settings.parse(_section(new, False)) != Settings()
    assert [record.getMessage() for record in caplog.records] == [
        f"fp8ext: the setting {old} is called {new} now; the next version refuses the old name"
    ]


@pytest.mark.parametrize(("old", "new"), OLD_KERNEL_SETTINGS.items())
def test_both_names_of_a_setting_are_an_error(old: str, new: str) -> None:
    with pytest.raises(
        ConfigError, match=f"kernels: .*{old} is the old name of {new}: expected one of them, found both"
    ):
        Settings.parse({"fp8ext": {"kernels": {old: True, new: True}}})


def test_new_names_of_settings_are_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        Settings.parse({"fp8ext": {"kernels": dict.fromkeys(OLD_KERNEL_SETTINGS.values(), True)}})
    assert not caplog.records


def test_only_an_engine_that_takes_updates_waits_for_one() -> None:
    assert Settings.parse({"fp8ext": {"ready": "when_current", "staging": "inplace"}}).ready == "when_current"
    with pytest.raises(ConfigError, match="expected staging shadow or inplace, found none"):
        Settings.parse({"fp8ext": {"ready": "when_current", "staging": "none"}})

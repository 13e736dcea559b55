# SPDX-License-Identifier: Apache-2.0
"""Features that are off one by one, where a vLLM lacks names."""

import ast
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_fp8ext.compat import features as module
from vllm_fp8ext.compat.features import KEY, adopt, is_available, reason_off, require_core, states, tell
from vllm_fp8ext.compat.interfaces import CORE, Interface, features
from vllm_fp8ext.compat.probe import SourceTree
from vllm_fp8ext.errors import ConfigError, UnsupportedVllmError
from vllm_fp8ext.log import log_once

OPTIONAL = [name for name in features() if name != CORE]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not looked yet."""
    monkeypatch.setattr(module, "_reasons", {})
    monkeypatch.setattr(module, "_reasons_told", {})
    module._warn.cache_clear()


def without(monkeypatch: pytest.MonkeyPatch, *gone: Interface) -> None:
    """A vLLM that lacks these names."""

    def problems(name: str) -> tuple[str, ...]:
        return tuple(
            f"{one.module}: {one.name} is missing" for one in features()[name].interfaces if one in gone
        )

    monkeypatch.setattr(module, "_problems", problems)


def config(**settings: object) -> SimpleNamespace:
    """The parts of a `VllmConfig` that are read."""
    parallel = (
        *("tensor_parallel_size", "pipeline_parallel_size"),
        *("data_parallel_size", "prefill_context_parallel_size"),
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            quantization="blockfp8",
            runner_type="generate",
            is_mm_prefix_lm=False,
            is_moe=True,
            enable_prompt_embeds=False,
        ),
        parallel_config=SimpleNamespace(**dict.fromkeys(parallel, 1)),
        lora_config=None,
        speculative_config=None,
        additional_config={"fp8ext": settings},
    )


def own(name: str) -> Interface:
    """A name that a feature alone leans on."""
    others = {
        (one.module, one.name)
        for other, feature in features().items()
        if other != name
        for one in feature.interfaces
    }
    return next(one for one in features()[name].interfaces if (one.module, one.name) not in others)


def dependents(name: str) -> set[str]:
    """A feature, and those that need it."""
    found: set[str] = set()
    new = {name}
    while new:
        found |= new
        new = {other for other, feature in features().items() if feature.needs & found} - found
    return found


@pytest.mark.parametrize("name", [name for name in OPTIONAL if name != "norm_rope"])
def test_a_missing_name_switches_its_feature_off_and_no_other(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = own(name)
    without(monkeypatch, gone)
    require_core()
    off = {other for other in OPTIONAL if not is_available(other)}
    assert off == dependents(name)
    engine = config()
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        tell(engine)
        tell(engine)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == len(off)
    [line] = [line for line in warned if f"the feature {name} is off" in line]
    assert gone.name in line
    told = {state.name: state for state in states(engine)}
    assert not told[name].on
    assert gone.name in str(told[name].reason)


def test_every_missing_core_name_is_told_in_one_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = features()[CORE].interfaces
    without(monkeypatch, first, second)
    with pytest.raises(UnsupportedVllmError) as refused:
        require_core()
    assert first.name in str(refused.value)
    assert second.name in str(refused.value)


def test_another_process_adopts_what_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, own("slot_fast_path"))
    engine = config()
    tell(engine)
    assert set(engine.additional_config[KEY]) == {"slot_fast_path"}
    monkeypatch.setattr(module, "_reasons", {})
    without(monkeypatch)
    adopt(engine)
    assert not is_available("slot_fast_path")
    assert is_available("output_interval")


def test_a_configuration_that_nobody_told_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, own("slot_fast_path"))
    adopt(config())
    assert not is_available("slot_fast_path")


def test_features_are_off_that_the_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here too, with those that need them, and for one engine, not for the next."""
    without(monkeypatch)
    engine = config(features_off=["flat_logprobs", "warmup"])
    tell(engine)
    off = dependents("flat_logprobs") | dependents("warmup")
    assert set(engine.additional_config[KEY]) == off == {o for o in OPTIONAL if not is_available(o)}
    told = {state.name: state for state in states(engine)}
    assert told["warmup"].reason == "the settings: features_off"
    tell(other := config())
    assert other.additional_config[KEY] == {}
    assert is_available("warmup")


PLAIN = {"decode_step_reuse", "sampling_cudagraph", "mixed_full_cudagraph"}


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("speculative_config", "drafts", "speculative decoding"),
        ("lora_config", "adapters", "LoRA adapters"),
        ("parallel_config.data_parallel_size", 2, "data parallelism of experts"),
        ("model_config.runner_type", "pooling", "a pooling model"),
    ],
)
def test_an_engine_switches_off_what_does_not_apply(
    where: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once in the log, without a warning, and where features are told."""
    without(monkeypatch)
    log_once.cache_clear()
    engine = config()
    owner, _, name = where.rpartition(".")
    setattr(getattr(engine, owner) if owner else engine, name, value)
    with caplog.at_level(logging.INFO, "vllm.fp8ext"):
        tell(engine)
        tell(engine)
    [line] = [record for record in caplog.records if said in record.getMessage()]
    assert line.levelno == logging.INFO
    assert all(name in line.getMessage() for name in PLAIN)
    off = {name for name in OPTIONAL if not is_available(name)}
    assert off == PLAIN
    told = {state.name: state.reason for state in states(engine) if not state.on}
    assert {told[name] for name in PLAIN} == {said}


def test_steps_of_several_ranks_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    engine = config()
    engine.parallel_config.tensor_parallel_size = 2
    tell(engine)
    off = {name for name in OPTIONAL if not is_available(name)}
    assert off == {"decode_step_reuse", "sampling_cudagraph"}
    told = {state.name: state.reason for state in states(engine) if not state.on}
    assert {told[name] for name in off} == {"tensor parallelism"}


def test_cores_of_a_dense_model_are_engines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    engine = config()
    engine.parallel_config.data_parallel_size = 2
    engine.model_config.is_moe = False
    tell(engine)
    assert all(is_available(name) for name in PLAIN)


@pytest.mark.parametrize("name", ["core", "flatlogprobs"])
def test_what_is_no_feature_is_not_switched_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    with pytest.raises(ConfigError, match=f"expected some of .*flat_logprobs, .*found '{name}'"):
        tell(config(features_off=[name]))


def test_states_tell_settings_and_the_machine() -> None:
    told = {state.name: state for state in states(config(kernels={"slot_fast_path": False}))}
    assert not told["slot_fast_path"].on
    assert "kernels.slot_fast_path is False" in str(told["slot_fast_path"].reason)
    assert told["flat_logprobs"].on
    assert told["flat_logprobs"].reason is None
    if not torch.cuda.is_available():
        assert told["decode_attention"].reason == "no CUDA GPU"


def test_what_needs_a_feature_that_is_off_is_off() -> None:
    told = {state.name: state for state in states(config(serving={"flat_logprobs": False}))}
    assert not told["flat_answers"].on
    assert told["flat_answers"].reason == "it needs flat_logprobs, which is off"


def test_another_quantization_has_no_features() -> None:
    other = SimpleNamespace(model_config=SimpleNamespace(quantization="fp8"), additional_config={})
    assert states(other) == []


def test_more_than_one_missing_name_is_counted() -> None:
    reason = reason_off(features()["slot_fast_path"], lambda name: None, ["a", "b", "c"])
    assert reason == "vLLM lacks a name: a (and 2 more)"


def test_names_are_looked_for_in_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    monkeypatch.setattr(module, "_installed", lambda: SourceTree(tmp_path))
    module._problems.cache_clear()
    try:
        assert "the module is missing" in str(module.reason_missing("json_responses"))
    finally:
        module._problems.cache_clear()


@pytest.mark.parametrize("name", OPTIONAL)
def test_nothing_of_core_imports_a_feature(name: str) -> None:
    """Modules of core are imported where those of another feature can't be."""
    from vllm_fp8ext.compat.interfaces import PACKAGE, headers

    blocked = [
        ".".join(("vllm_fp8ext", *Path(header.file).with_suffix("").parts))
        for header in features()[name].headers
    ]
    for header in headers():
        if header.feature == CORE:
            for node in ast.parse((PACKAGE / header.file).read_text()).body:
                if isinstance(node, ast.ImportFrom):
                    imported = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
                    assert not imported & set(blocked), header.file


@pytest.mark.full
def test_registering_needs_no_feature() -> None:
    """A vLLM process in which no module of a feature can be imported makes `blockfp8` known all the same."""
    blocked = [
        ".".join(("vllm_fp8ext", *Path(header.file).with_suffix("").parts))
        for name in OPTIONAL
        for header in features()[name].headers
    ]
    program = f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
from vllm_fp8ext.register import register
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
register()
import vllm_fp8ext.serve.plugin
import vllm_fp8ext.layers.quantization
sys.exit("blockfp8" not in QUANTIZATION_METHODS)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Which layers of a real multimodal model stay in 16 bits, whatever the device."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python.processes import run

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "tower": {"quantize": ["*vision_tower*"]},
    "fused by its own name": {"quantize": ["*.gate_up_proj"]},
    "fused by its parts": {"quantize": ["*.gate_proj", "*.up_proj"]},
    "everything": {"quantize": ["*"]},
    "ignored and asked for": {"quantize": ["*"], "ignore": ["*.down_proj", "*vision_tower*"]},
}
TOWER = {
    f"vision_tower.vision_model.encoder.layers.{layer}.{name}"
    for layer in range(2)
    for name in ("self_attn.qkv_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
}
LANGUAGE = "language_model.model.layers."
GATE_UP = {f"{LANGUAGE}{layer}.mlp.gate_up_proj" for layer in range(2)}
DOWN = {f"{LANGUAGE}{layer}.mlp.down_proj" for layer in range(2)}
ATTENTION = {f"{LANGUAGE}{layer}.self_attn.{name}_proj" for layer in range(2) for name in ("qkv", "o")}
KEPT: dict[str, set[str]] = {
    "default": TOWER | GATE_UP | DOWN,
    "tower": GATE_UP | DOWN,
    "fused by its own name": TOWER | DOWN,
    "fused by its parts": TOWER | DOWN,
    "everything": set(),
    "ignored and asked for": TOWER | DOWN,
    "names that say nothing": TOWER | GATE_UP | DOWN,
}
"""By settings. An MLP of 344 columns is one that FP8 kernels do not take for many tokens; the tower they would take."""


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("kept")
    asked, out = folder / "asked.json", folder / "out.json"
    asked.write_text(json.dumps(SETTINGS))
    line = [
        sys.executable,
        "-P",
        str(Path(__file__).with_name("encoder_layers_scenario.py")),
        str(asked),
        str(out),
    ]
    env = {**os.environ, "VLLM_PLUGINS": "fp8ext"}
    done = run(line, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    loaded: dict[str, dict[str, list[str]]] = json.loads(out.read_text())
    return loaded


@pytest.mark.parametrize("settings", KEPT)
def test_encoders_and_shapes_that_no_kernel_takes_are_kept_unless_asked_for(
    layers: dict[str, dict[str, list[str]]], settings: str
) -> None:
    result = layers[settings]
    assert set(result.get("KeptLinearMethod", [])) == KEPT[settings]
    assert set(result["BlockFp8LinearMethod"]) == (TOWER | GATE_UP | DOWN | ATTENTION) - KEPT[settings]


def test_the_log_says_which_and_why(layers: dict[str, dict[str, list[str]]]) -> None:
    down, gate_up, tower = layers["default"]["log"]
    assert "keeps 2 layers in 16 bits, of 256x344: FP8 kernels for many tokens" in down
    assert "keeps 2 layers in 16 bits, of 688x256" in gate_up
    assert "keeps 8 layers in 16 bits, parts of an encoder beside the language model: " in tower
    assert "vision_tower.vision_model.encoder.layers.*.mlp.fc1 (2), " in tower
    told = json.loads(down.partition("--additional-config ")[2].strip("'"))
    assert told == {"fp8ext": {"quantize": [f"{LANGUAGE}*.mlp.down_proj"]}}
    assert layers["everything"]["log"] == []
    assert layers["ignored and asked for"]["log"] == []  # what settings say is no news

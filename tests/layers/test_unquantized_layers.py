# SPDX-License-Identifier: Apache-2.0
"""Shapes and names by which layers stay in 16 bits."""

import pytest

from vllm_fp8ext.layers.unquantized_layers import decides_decay, in_encoder, report, unfit


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "taken"),
    [
        (4096, 12288, "bfloat16", True),
        (64, 128, "bfloat16", True),
        (64, 128, "float16", True),
        (96, 128, "float16", False),
        (1280, 3420, "bfloat16", False),
        (1152, 4304, "bfloat16", False),
        (1280, 6840, "bfloat16", False),
        (3584, 18944 // 8, "bfloat16", False),
        (6840, 1280, "bfloat16", False),
    ],
)
def test_shapes_that_kernels_take(rows: int, columns: int, dtype: str, taken: bool) -> None:
    assert (unfit(rows, columns, dtype) is None) is taken


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("visual.blocks.0.attn.qkv", True),
        ("model.visual.blocks.0.attn.qkv", True),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", True),
        ("audio_tower.layers.0.fc1", True),
        ("model.encoder.layers.0.fc1", True),
        ("language_model.model.layers.0.mlp.down_proj", False),
        ("model.layers.0.mlp.visual_proj", False),
    ],
)
def test_names_of_encoders(name: str, inside: bool) -> None:
    assert in_encoder(name) is inside


@pytest.mark.parametrize(
    ("name", "decides"),
    [
        ("model.layers.0.linear_attn.in_proj_ba", True),
        ("model.layers.0.linear_attn.in_proj_a", True),
        ("model.layers.0.linear_attn.in_proj_qkvz", False),
        ("in_proj_b.weight", False),
    ],
)
def test_projections_that_decide_the_decay(name: str, decides: bool) -> None:
    assert decides_decay(name) is decides


def test_each_reason_is_said_once() -> None:
    names = [f"model.layers.{layer}.mlp.down_proj" for layer in range(28)]
    [line] = report({"of 8x344": names})
    assert line.startswith(
        "blockfp8 keeps 28 layers in 16 bits, of 8x344: model.layers.*.mlp.down_proj (28)."
    )
    assert report({}) == []

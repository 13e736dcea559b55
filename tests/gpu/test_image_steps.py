# SPDX-License-Identifier: Apache-2.0
"""Engines of models that see images: steps of text alone are as fast as a text model's, and answers stay."""

from pathlib import Path

import pytest
import torch
import transformers

from .modes import told

pytestmark = pytest.mark.gpu

TEXT = {
    "vocab_size": 128,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 10000.0},
}
VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 512}
TOKENS = {
    "image_token_id": 100,
    "video_token_id": 101,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
}


def test_images_and_text_are_answered_as_vllm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs hold steps of text, also where a request that decodes began with an image."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "e2e"))
    from zoo_processors import write_qwen_vl

    torch.manual_seed(0)
    vision = {**VISION, "fullatt_block_indexes": [0], "window_size": 28}
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision, **TOKENS)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    for part, parameter in model.named_parameters():
        if part.endswith("weight") and parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    write_qwen_vl(tmp_path / "model")
    ours, plain = told("image_steps_scenario.py", ("ours", "plain"), tmp_path / "model", tmp_path)
    assert plain["followed"] == plain["whole"] == 0
    for name in ("text", "images", "both"):
        assert ours[f"{name}, ours"][0] > 15, "steps in which all decode"
        assert ours[name] == plain[name]
    assert ours["text, ours"][1] >= 11, "every step in which text joins"
    assert ours["images, ours"][1] == 0
    assert 0 < ours["both, ours"][1] < 12
    assert ours["images"] != ours["text"], "images count"

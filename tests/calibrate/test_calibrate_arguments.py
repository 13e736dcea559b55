# SPDX-License-Identifier: Apache-2.0
"""Settings that `fp8ext calibrate` is given beside its own."""

import json

import pytest

from vllm_fp8ext.calibrate.command import with_scales
from vllm_fp8ext.errors import ConfigError

SCALES = {"policy": "calibrate", "tokens": 100}
OTHERS = ["--tensor-parallel-size", "2", "--max-model-len=64"]


def test_without_settings_there_are_those_of_the_scales() -> None:
    assert with_scales(OTHERS, SCALES) == ({"fp8ext": {"kv_scales": SCALES}}, OTHERS)


@pytest.mark.parametrize("equals", [False, True])
@pytest.mark.parametrize("name", ["--additional-config", "--additional_config"])
def test_settings_are_kept_beside_the_scales(name: str, equals: bool) -> None:
    told = json.dumps({"fp8ext": {"ignore": ["a=b"]}, "other": {}})
    line = [OTHERS[0], OTHERS[1], *([f"{name}={told}"] if equals else [name, told]), OTHERS[2]]
    merged = {"fp8ext": {"ignore": ["a=b"], "kv_scales": SCALES}, "other": {}}
    assert with_scales(line, SCALES) == (merged, OTHERS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            ["--additional-config", '{"fp8ext": {"kv_scales": "static"}}'],
            "expected no kv_scales.*found 'static'",
        ),
        (["--additional-config", "{"], "a JSON object of objects, found '{'"),
        (["--additional-config", "[]"], "a JSON object of objects"),
        (["--additional-config", '{"fp8ext": 1}'], "a JSON object of objects"),
        (["--additional-config"], "a JSON object of objects, found ''"),
        (["--additional-config.fp8ext.staging", "none"], "--additional-config.fp8ext.staging: expected"),
    ],
)
def test_settings_that_can_not_be_merged_are_refused(line: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_scales(line, SCALES)

# SPDX-License-Identifier: Apache-2.0
"""Bodies that name every tensor otherwise than the manifest does."""

import json
from dataclasses import replace

from vllm_fp8ext.serve.body_checks import BodyChecks, Limits
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec

NAMES = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(150)]
OTHERS = {name.replace("model.", "model.language_model.of.a.longer.name."): name for name in NAMES}
SPECS = {name: TensorSpec(name, (0,), "bfloat16") for name in NAMES}
MANIFEST = Manifest(SPECS, frozenset(), {}, "fp32", 1, {"lm_head.weight": NAMES[0]}, OTHERS)


def test_other_names_of_a_whole_checkpoint_are_known() -> None:
    checks = BodyChecks()
    assert checks.run("manifest", MANIFEST.as_dict()).keys() == {"limits"}
    empty = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(dict.fromkeys(OTHERS, empty)).encode()
    result = checks.run("header", header, 8 + len(header), "a body")
    assert [tensor[0] for tensor in result["tensors"]] == list(OTHERS)
    claims = {"tensors": {name: {"shape": [0], "dtype": "bfloat16"} for name in OTHERS}}
    told = checks.run("json", "vllm_fp8ext.serve.schema:OpenUpdate", json.dumps(claims).encode())
    assert told["fields"]["tensors"].keys() == OTHERS.keys()


def test_there_is_room_for_the_longest_names() -> None:
    few = Limits.of(replace(MANIFEST, aliases={}, tied={}))
    room = Limits.of(MANIFEST)
    assert room.tensors == few.tensors + 2
    longer = max(map(len, OTHERS)) - max(map(len, NAMES))
    assert room.header_bytes >= few.header_bytes + longer * 2 * len(NAMES)

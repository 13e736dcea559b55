# SPDX-License-Identifier: Apache-2.0
"""What vLLM's weight transfer says is checked before anything is done."""

from typing import Any

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.native_info import announced, nccl_init, own_part, require_version

STORE = {"master_address": "127.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 3}


def test_a_handshake_as_trl_makes_it() -> None:
    init = nccl_init({**STORE, "packed": True}, 2)
    assert (init.bucket_bytes, init.rank_offset, init.world_size) == (1 << 30, 1, 3)
    assert nccl_init(STORE, 2).bucket_bytes is None


@pytest.mark.parametrize("world_size", [3, 4])
def test_another_world_size_is_refused(world_size: int) -> None:
    with pytest.raises(UpdateError, match=f"this server has {world_size} ranks"):
        nccl_init(STORE, world_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank_offset": 0}, "rank_offset: expected 1 to"),
        ({"world_size": True}, "world_size: expected"),
        ({"master_address": None}, "expected master_address and master_port, or nccl_unique_id_b64"),
        ({"nccl_unique_id_b64": "AAAA"}, "found both"),
        ({"master_address": None, "master_port": None, "nccl_unique_id_b64": "AAAA"}, "128 bytes"),
        ({"packed": "yes"}, "packed: expected bool"),
        ({"packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes: expected"),
        ({"other": 1}, "found other"),
    ],
)
def test_handshakes_that_can_not_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UpdateError, match=message) as raised:
        nccl_init({**STORE, **change}, 2)
    assert raised.value.kind == "invalid-request"


@pytest.mark.parametrize("info", [None, [], "x"])
def test_a_handshake_is_an_object(info: Any) -> None:
    with pytest.raises(UpdateError, match="expected an object"):
        nccl_init(info, 1)


def told(**more: Any) -> dict[str, Any]:
    return {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]], **more}


def test_tensors_as_they_are_announced() -> None:
    announcement = announced(told(packed=True))
    assert (announcement.specs, announcement.wire) == (
        [TensorSpec("a", (2, 3), "bfloat16")],
        {"packed": True},
    )


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"names": "a"}, "invalid-request"),
        ({"names": [7]}, "invalid-request"),
        ({"names": ["x" * 513]}, "invalid-request"),
        ({"names": ["a\nb"]}, "invalid-request"),
        ({"shapes": [[2, 3], [4]]}, "invalid-request"),
        ({"shapes": [["2"]]}, "invalid-request"),
        ({"shapes": [[1 << 40, 1 << 40]]}, "invalid-request"),
        ({"dtype_names": ["torch.bfloat16"]}, "wrong-dtype"),
        ({"dtype_names": [None]}, "wrong-dtype"),
    ],
)
def test_announcements_that_can_not_be(change: dict[str, Any], kind: str) -> None:
    with pytest.raises(UpdateError) as raised:
        announced(told(**change))
    assert raised.value.kind == kind


def test_one_for_each_rank_must_be_alike() -> None:
    assert own_part([told(), told()], 2) == told()
    assert own_part(told(), 2) == told()
    with pytest.raises(UpdateError, match="expected 2 of them"):
        own_part([told()], 2)
    with pytest.raises(UpdateError, match="expected the same for every rank"):
        own_part([told(), told(names=["b"])], 2)


def test_versions() -> None:
    assert require_version("step-1") == "step-1"
    with pytest.raises(UpdateError, match="expected 1 to 256 characters"):
        require_version("a\x1fb")


NAMES = ("model.layers.0.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight")
MANIFEST = Manifest(
    {name: TensorSpec(name, (2,), "bfloat16") for name in NAMES},
    frozenset(),
    dict.fromkeys(NAMES, ()),
    "fp32",
    1,
)


@pytest.mark.parametrize(
    ("sent", "known"),
    [
        ("_orig_mod.module.model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.layers.0.mlp.down_proj.base_layer.weight", NAMES[0]),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("base_model.model.lm_head.weight", "lm_head.weight"),
        ("lm_head.original_module.weight", None),
        ("lm_head.modules_to_save.default.weight", None),
        ("actor.model.norm.weight", None),
        ("model.layers.0.mlp.down_proj.lora_A.default.weight", None),
    ],
)
def test_names_with_wrappers(sent: str, known: str | None) -> None:
    assert MANIFEST.unwrapped(sent) == (known or sent)


def test_a_name_with_wrappers_that_two_tensors_have() -> None:
    names = ("model.norm.weight", "model.language_model.norm.weight")
    tensors = {name: TensorSpec(name, (2,), "bfloat16") for name in names}
    both = Manifest(tensors, frozenset(), dict.fromkeys(names, ()), "fp32", 1)
    assert both.unwrapped("module.norm.weight") == "module.norm.weight"
    assert [both.unwrapped(name) for name in names] == list(names)

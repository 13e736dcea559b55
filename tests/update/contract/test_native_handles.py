# SPDX-License-Identifier: Apache-2.0
"""CUDA IPC handles come as they are made, typed or pickled, and are the same data; everything else is refused."""

import base64
import os
import pickle
from typing import Any

import pytest
import torch
from shared_exports import shared_exports

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.native_handles import FIELDS, exported, plain, typed, unpickled

SPEC = TensorSpec("w", (2, 3), "bfloat16")


@pytest.fixture(scope="module")
def arguments() -> Any:
    """What torch tells of a tensor."""
    with shared_exports() as exports:
        return exports.reduce(torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)))[1]


def pickled(handles: Any) -> dict[str, Any]:
    return {"names": ["w"], "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}


def test_handles_are_the_same_however_they_come(arguments: Any) -> None:
    made = [{"gpu-1": arguments}]
    wanted = plain(made)
    assert wanted[0]["gpu-1"].keys() == FIELDS.keys()
    assert wanted[0]["gpu-1"]["dtype"] == "bfloat16"
    for info in (
        {"names": ["w"], "ipc_handles": made},
        {"names": ["w"], "ipc_handles": wanted},
        pickled(made),
    ):
        assert typed(info, read_pickles=True) == {"names": ["w"], "ipc_handles": wanted}
    [handle] = exported(wanted, [SPEC], packed=False, sizes=None)["gpu-1"]
    assert (handle.start, handle.size, handle.storage_bytes, handle.counter_offset) == (0, 12, 12, 7)


def test_a_pickle_is_refused_unless_it_is_asked_for(arguments: Any) -> None:
    with pytest.raises(UpdateError, match="expected typed ipc_handles, found a pickle") as refused:
        typed(pickled([{"gpu": arguments}]), read_pickles=False)
    assert refused.value.kind == "pickled-handles"


class _Bomb:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self._reduced = call, arguments

    def __reduce__(self) -> Any:
        return self._reduced

    def __str__(self) -> str:
        return str(self._reduced[0])


@pytest.mark.parametrize(
    "bomb",
    [
        _Bomb(os.system, "false"),
        _Bomb(eval, "1"),
        _Bomb(torch.load, "x"),
        _Bomb(torch.Tensor, [1]),
        _Bomb(torch.zeros, 2),
        torch.ones(2),
        torch.device("cpu"),
    ],
    ids=["system", "eval", "load", "Tensor", "zeros", "values", "device"],
)
def test_nothing_of_a_pickle_is_executed(bomb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pickle.dumps([{"gpu": bomb}])
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("it was executed"))
    with pytest.raises(UpdateError, match="expected a pickle of CUDA IPC handles"):
        unpickled(base64.b64encode(content).decode())


@pytest.mark.parametrize("text", [None, 7, "no base64!", "", base64.b64encode(b"\x80\x04").decode()])
def test_what_is_no_pickle_is_refused(text: Any) -> None:
    with pytest.raises(UpdateError) as refused:
        unpickled(text)
    assert refused.value.kind == "invalid-request"


def test_handles_that_come_twice_are_refused(arguments: Any) -> None:
    handles = [{"gpu": arguments}]
    with pytest.raises(UpdateError, match="found both"):
        typed({**pickled(handles), "ipc_handles": handles}, read_pickles=True)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"shape": [3, 2]}, "wrong-shape", "expected \\[2, 3\\]"),
        ({"dtype": "float16"}, "wrong-dtype", "expected bfloat16"),
        ({"strides": [1, 2]}, "invalid-request", "dense rows"),
        ({"strides": [3]}, "invalid-request", "dense rows"),
        ({"offset": 1}, "invalid-request", "do not lie in a storage of 12 bytes"),
        ({"offset": -1}, "invalid-request", "offset: expected a number"),
        ({"storage_bytes": True}, "invalid-request", "storage_bytes: expected a number"),
        ({"counter": "/../x"}, "invalid-request", "counter of torch's"),
        ({"counter_offset": 10_000}, "invalid-request", "counter of torch's"),
        ({"handle": "AAAA"}, "invalid-request", "expandable_segments"),
        ({"handle": None}, "invalid-request", "expandable_segments"),
        ({"event": "AAAA"}, "invalid-request", "event of 64 bytes"),
        ({"wait": 1}, "invalid-request", "wait: expected bool"),
        ({"more": 1}, "invalid-request", "expected shape, strides"),
    ],
)
def test_a_handle_that_says_something_else_is_refused(
    arguments: Any, change: dict[str, Any], kind: str, message: str
) -> None:
    [handles] = plain([{"gpu": arguments}])
    with pytest.raises(UpdateError, match=message) as refused:
        exported([{"gpu": {**handles["gpu"], **change}}], [SPEC], packed=False, sizes=None)
    assert refused.value.kind == kind


@pytest.mark.parametrize(
    ("handles", "message"),
    [
        (None, "expected a list of 1"),
        ([], "expected a list of 1"),
        ({}, "expected a list of 1"),
        ([{}], "by the UUID of its GPU"),
        ([{"../x": {}}], "expected the UUID of a GPU"),
        ([{"gpu": [1]}], "expected shape"),
    ],
)
def test_what_are_no_handles_is_refused(handles: Any, message: str) -> None:
    with pytest.raises(UpdateError, match=message):
        exported(handles, [SPEC], packed=False, sizes=None)


def test_every_gpu_has_every_tensor(arguments: Any) -> None:
    handles = plain([{"a": arguments, "b": arguments}, {"a": arguments}])
    with pytest.raises(UpdateError, match="expected the GPUs of the first"):
        exported(handles, [SPEC, SPEC], packed=False, sizes=None)
    assert exported([handles[0]] * 2, [SPEC, SPEC], packed=False, sizes=None).keys() == {"a", "b"}


def test_a_packed_buffer_has_one_tensor_after_the_other() -> None:
    with shared_exports() as exports:
        handles = plain({"gpu": exports.reduce(exports.buffer(40))[1]})
    specs = [SPEC, TensorSpec("v", (3,), "float32")]
    found = exported(handles, specs, packed=True, sizes=[12, 12])
    assert [(part.start, part.size) for part in found["gpu"]] == [(0, 12), (12, 12)]
    for sizes in (None, [12], [12, 13], "12"):
        with pytest.raises(UpdateError, match="as shapes and dtypes say"):
            exported(handles, specs, packed=True, sizes=sizes)
    with pytest.raises(UpdateError, match="expected 40 bytes at most"):
        exported(handles, [SPEC] * 4, packed=True, sizes=[12] * 4)
    with pytest.raises(UpdateError, match="no tensor_sizes"):
        exported([], [], packed=False, sizes=[])

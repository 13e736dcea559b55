# SPDX-License-Identifier: Apache-2.0
"""Headers against the safetensors library, and every lie that one can tell."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract import safetensors_header
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.safetensors_header import HEADER_LIMIT, StoredTensor, file_tensors, parse

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int64,
    torch.bool,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda n: n != "__metadata__")
TENSORS = st.dictionaries(
    NAMES, st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6
)


def parsed(content: bytes) -> list[StoredTensor]:
    return parse(lambda start, size: content[start : start + size], len(content), "chunk 3")


def refused(content: bytes) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        parsed(content)
    assert "chunk 3" in str(caught.value)
    return caught.value


def encoded(header: Any, data: bytes = bytes(20)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def good() -> dict[str, Any]:
    """`a` takes bytes 0 to 12, `b` 12 to 20, `empty` none."""
    return {
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]},
        "empty": {"dtype": "F16", "shape": [0, 5], "data_offsets": [12, 12]},
        "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "__metadata__": {"format": "pt"},
    }


@given(TENSORS, st.none() | st.just({"format": "pt"}))
def test_what_the_library_writes_is_read(
    tensors: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str] | None
) -> None:
    values = {name: torch.ones(shape).to(dtype) for name, (dtype, shape) in tensors.items()}
    content = save(values, metadata)
    result = parsed(content)
    assert sorted(stored.spec.name for stored in result) == sorted(tensors)
    for stored in result:
        dtype, shape = tensors[stored.spec.name]
        name = str(dtype).removeprefix("torch.")
        assert stored.spec == TensorSpec(stored.spec.name, tuple(shape), name)
        raw = values[stored.spec.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert content[stored.start : stored.start + stored.size] == raw


def test_the_example_is_good() -> None:
    first = len(encoded(good())) - 20
    assert [(t.spec.name, t.start - first, t.size) for t in parsed(encoded(good()))] == [
        ("b", 12, 8),
        ("empty", 12, 0),
        ("a", 0, 12),
    ]


@pytest.mark.parametrize(
    ("tensor", "field", "value"),
    [
        ("a", "data_offsets", [0, 11]),
        ("a", "data_offsets", [0, 13]),
        ("a", "data_offsets", [8, 20]),
        ("a", "data_offsets", [12, 0]),
        ("a", "data_offsets", [-12, 0]),
        ("a", "data_offsets", [1 << 61, (1 << 61) + 12]),
        ("a", "data_offsets", [0, 1 << 70]),
        ("a", "data_offsets", [False, 12]),
        ("a", "data_offsets", [0.0, 12.0]),
        ("a", "data_offsets", ["0", "12"]),
        ("a", "data_offsets", [0]),
        ("a", "data_offsets", [0, 6, 12]),
        ("a", "data_offsets", [[0], [12]]),
        ("a", "data_offsets", {"0": 0, "12": 12}),
        ("a", "data_offsets", "01"),
        ("a", "data_offsets", 12),
        ("a", "data_offsets", None),
        ("b", "data_offsets", [4, 12]),
        ("b", "data_offsets", [13, 21]),
        ("b", "data_offsets", [0, 8]),
        ("empty", "data_offsets", [5, 5]),
        ("empty", "data_offsets", [21, 21]),
        ("a", "shape", [2, 2]),
        ("a", "shape", [2, 3, 2]),
        ("a", "shape", []),
        ("a", "shape", [-2, -3]),
        ("a", "shape", [1 << 40, 1 << 40]),
        ("a", "shape", [6, True]),
        ("a", "shape", [2.0, 3.0]),
        ("a", "shape", ["2", "3"]),
        ("a", "shape", [[2, 3]]),
        ("a", "shape", [float("nan")]),
        ("a", "shape", 6),
        ("a", "shape", "23"),
        ("a", "shape", {"2": 3}),
        ("a", "shape", None),
        ("empty", "shape", [1 << 63, 0]),
        ("a", "dtype", "F32"),
        ("a", "dtype", "I8"),
        ("a", "dtype", 16),
        ("a", "dtype", ["BF16"]),
        ("a", "dtype", None),
    ],
)
def test_a_lie_is_refused(tensor: str, field: str, value: object) -> None:
    header = good()
    header[tensor][field] = value
    error = refused(encoded(header))
    assert (error.kind, error.status) == ("broken-safetensors", 422)


@pytest.mark.parametrize("shape", ["", {}])
def test_a_scalars_shape_is_a_list_too(shape: object) -> None:
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}
    assert refused(encoded(header, bytes(4))).kind == "broken-safetensors"


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
def test_a_missing_field_is_refused(field: str) -> None:
    header = good()
    del header["a"][field]
    error = refused(encoded(header))
    assert error.kind == "broken-safetensors"
    assert "a: expected dtype, shape and two data_offsets" in str(error)


@pytest.mark.parametrize("data", [b"", bytes(19), bytes(21), bytes(4096)])
def test_bytes_that_no_tensor_covers_or_that_are_not_there(data: bytes) -> None:
    assert refused(encoded(good(), data)).kind == "broken-safetensors"


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_hole_is_refused(name: str) -> None:
    header = good()
    del header[name]
    assert refused(encoded(header)).kind == "broken-safetensors"


@pytest.mark.parametrize("entry", [None, 5, "text", [], ["BF16", [2, 3], [0, 12]], {}])
def test_a_tensor_that_is_no_object_is_refused(entry: object) -> None:
    assert refused(encoded({**good(), "a": entry})).kind == "broken-safetensors"


def test_an_unknown_dtype_is_left_to_the_manifest() -> None:
    """It refuses with all other problems of a chunk; where the bytes lie is checked here all the same."""
    header = good()
    header["a"]["dtype"] = "F7"
    assert parsed(encoded(header))[2].spec == TensorSpec("a", (2, 3), "F7")
    header["a"]["data_offsets"] = [0, 11]
    assert refused(encoded(header)).kind == "broken-safetensors"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (b'{"a":1,"b":2,"a":3,"b":4}', ["a", "b"]),
        (b'{"a":{"dtype":"U8","shape":[],"shape":[1],"data_offsets":[0,1]}}', ["shape"]),
        (b'{"__metadata__":{},"__metadata__":{}}', ["__metadata__"]),
    ],
)
def test_a_name_that_comes_twice_is_refused(text: bytes, names: list[str]) -> None:
    error = refused(encoded(text))
    assert (error.kind, error.status) == ("duplicate-tensor", 422)
    assert error.details["problems"] == [{"kind": "duplicate-tensor", "tensor": name} for name in names]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{}}",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,20]}}',
    ],
    ids=lambda text: text[:12].decode("latin-1"),
)
def test_what_is_no_header_is_refused(text: bytes) -> None:
    error = refused(encoded(text))
    assert (error.kind, error.status) == ("broken-safetensors", 422)


@pytest.mark.parametrize(
    "text", [b'{"\\ud800":{}}', b'{"a":{"dtype":"\\ud800","shape":[0],"data_offsets":[0,0]}}']
)
def test_text_that_is_no_unicode_is_refused(text: bytes) -> None:
    """It could not be told to anybody: neither the ranks nor the client."""
    error = refused(encoded(text, b""))
    assert error.kind == "broken-safetensors"
    str(error).encode()


def test_a_shape_of_very_many_dimensions_is_refused() -> None:
    """Before its product is taken, which would have as many bits as there are dimensions."""
    header = {"a": {"dtype": "F32", "shape": [(1 << 62) - 1] * 500_000, "data_offsets": [0, 20]}}
    assert refused(encoded(header)).kind == "broken-safetensors"


def test_a_header_beyond_the_limit_is_not_read() -> None:
    read: list[int] = []

    def bounded(start: int, size: int) -> bytes:
        read.append(size)
        return struct.pack("<Q", HEADER_LIMIT + 1)

    with pytest.raises(UpdateError) as caught:
        parse(bounded, 1 << 30, "chunk 3")
    assert (caught.value.kind, caught.value.status) == ("header-too-large", 413)
    assert caught.value.details == {"limit": HEADER_LIMIT}
    assert read == [8]


def test_the_longest_header_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(good()).encode()
    monkeypatch.setattr(safetensors_header, "HEADER_LIMIT", len(text))
    assert len(parsed(encoded(text))) == 3
    assert refused(encoded(text + b" ")).kind == "header-too-large"


def test_every_beginning_of_a_file_is_refused() -> None:
    content = encoded(good())
    for length in range(len(content)):
        assert refused(content[:length]).kind == "broken-safetensors", length


def only_refused(content: bytes) -> None:
    """Read, or refused: never another exception; what is read covers the file."""
    try:
        result = parsed(content)
    except UpdateError as error:
        str(error).encode()
        return
    (header,) = struct.unpack("<Q", content[:8])
    assert sum(stored.size for stored in result) == len(content) - 8 - header


@given(st.binary(max_size=80))
def test_any_bytes(content: bytes) -> None:
    only_refused(content)
    only_refused(encoded(content))


@given(st.integers(0, len(encoded(good())) - 1), st.binary(min_size=1, max_size=3))
def test_any_damage(position: int, damage: bytes) -> None:
    content = bytearray(encoded(good()))
    content[position : position + len(damage)] = damage
    only_refused(bytes(content))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(JSON, st.sampled_from(("dtype", "shape", "data_offsets")))
def test_any_json(value: object, field: str) -> None:
    header = good()
    header["a"][field] = value
    for garbage in (value, {"a": value}, header):
        only_refused(encoded(garbage))


# --- files


def test_a_file_is_read_as_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(encoded(good()))
    assert file_tensors(file) == parsed(encoded(good()))
    file.write_bytes(encoded(good())[:-1])
    with pytest.raises(UpdateError, match=r"model\.safetensors") as caught:
        file_tensors(file)
    assert caught.value.kind == "broken-safetensors"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UpdateError) as missing:
        file_tensors(tmp_path / "missing.safetensors")
    assert (missing.value.kind, missing.value.status) == ("not-found", 404)
    with pytest.raises(UpdateError, match="directory") as folder:
        file_tensors(tmp_path)
    assert (folder.value.kind, folder.value.status) == ("unreadable", 422)

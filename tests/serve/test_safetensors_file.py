# SPDX-License-Identifier: Apache-2.0
"""Bodies made of files against the safetensors library, and the files that are refused."""

import hashlib
import json
import struct
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import safetensors_body
from vllm_fp8ext.serve.safetensors_body import SafetensorsBody, bodies
from vllm_fp8ext.serve.safetensors_file import Range, ranges_of

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int64,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda n: n != "__metadata__"
)


@st.composite
def checkpoints(draw: st.DrawFn) -> list[dict[str, Tensor]]:
    """Files of tensors of all dtypes and of any names, scalars and empty ones among them."""
    noise = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    files: list[dict[str, Tensor]] = [{} for _ in range(draw(st.integers(1, 3)))]
    for name in draw(st.lists(NAMES, unique=True, max_size=8)):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        values = torch.randint(0, 256, [*shape, 8], generator=noise, dtype=torch.uint8)
        dtype = draw(st.sampled_from(DTYPES))
        files[draw(st.integers(0, len(files) - 1))][name] = values.view(dtype)[..., 0].contiguous()
    return files


def raw(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """What is compared: a NaN in a tensor is not equal to itself, its bytes are."""
    return {
        name: (tensor.dtype, tuple(tensor.shape), bytes(tensor.clone().untyped_storage()))
        for name, tensor in tensors.items()
    }


@given(checkpoints(), st.one_of(st.integers(0, 200), st.just(1 << 30)))
@settings(max_examples=100)
def test_bodies_are_safetensors_of_the_same_bytes(files: list[dict[str, Tensor]], limit: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index, tensors in enumerate(files):
            save_file(tensors, folder / f"{index}.safetensors", metadata={"format": "pt"})
        ranges = ranges_of(folder)
        collected: dict[str, Tensor] = {}
        for body in bodies(ranges, limit):
            content = b"".join(body)
            assert len(content) == body.length
            assert b"".join(body.fetched()) == content
            assert hashlib.sha256(content).digest() == body.sha256()
            assert len(body.parts) == 1 or sum(part.size for part in body.parts) <= limit
            tensors = load(content)
            assert not tensors.keys() & collected.keys()
            collected |= tensors
            (folder / "body").write_bytes(content)
            with safe_open(folder / "body", framework="pt") as reader:
                assert raw({name: reader.get_tensor(name) for name in reader.keys()}) == raw(tensors)  # noqa: SIM118
    assert raw(collected) == raw({name: tensor for tensors in files for name, tensor in tensors.items()})


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 120))
def test_bodies_are_filled_in_order(sizes: list[int], limit: int) -> None:
    """No body could have taken the first tensor of the next one."""
    ranges = [Range(str(index), "U8", (size,), Path("none"), 0, size) for index, size in enumerate(sizes)]
    groups = [body.parts for body in bodies(ranges, limit)]
    assert [part for group in groups for part in group] == ranges
    assert all(groups)
    for group, following in pairwise(groups):
        assert sum(part.size for part in group) + following[0].size > limit


def test_a_header_is_padded_so_that_tensors_are_aligned(tmp_path: Path) -> None:
    for length in range(1, 9):
        save_file({"n" * length: torch.ones(3)}, tmp_path / "model.safetensors")
        [body] = bodies(ranges_of(tmp_path / "model.safetensors"), 0)
        assert len(body.header) % 8 == 0


def test_a_body_comes_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_body, "PIECE", 100)
    save_file({"a": torch.arange(250, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    [body] = bodies(ranges_of(tmp_path), 1 << 20)
    assert [len(piece) for piece in body][1:] == [100, 100, 50]


def test_nothing_makes_no_body() -> None:
    assert list(bodies([], 100)) == []
    assert SafetensorsBody(()).length == len(SafetensorsBody(()).header)


def test_only_safetensors_files_of_a_folder_are_read(tmp_path: Path) -> None:
    save_file({"b": torch.ones(1)}, tmp_path / "2.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "1.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert [part.name for part in ranges_of(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".", r"expected \*\.safetensors files, found none"),
        ("missing", "none of that name"),
        ("missing.safetensors", "none of that name"),
    ],
)
def test_a_checkpoint_that_is_not_there(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ranges_of(tmp_path / name)


def with_header(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08",
        b"not safetensors at all",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"\xff\xff",
        struct.pack("<Q", 3) + b"{}}",
        with_header([]),
        with_header("text"),
        with_header({"a": []}),
        with_header({"a": {"dtype": "U8", "shape": [1]}}),
        with_header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}),
        with_header({"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}),
        with_header({"a": {"dtype": "U8", "shape": [1], "data_offsets": ["0", "1"]}}),
        with_header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}),
        with_header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}),
    ],
)
def test_what_is_not_safetensors_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a valid safetensors file"):
        ranges_of(tmp_path)


@pytest.mark.parametrize("keep", [-1, -500])
def test_a_truncated_file_is_refused_with_both_sizes(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(400, dtype=torch.uint8), "b": torch.ones(400, dtype=torch.uint8)}, file)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        ValueError, match=rf"model\.safetensors: .*expected {size} bytes.*found {size + keep}$"
    ):
        ranges_of(file)


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"model\.safetensors: .*expected .* found"):
        ranges_of(file)


def test_a_file_that_shrinks_later_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(400)}, file)
    [body] = bodies(ranges_of(file), 1 << 20)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UpdateError, match=r"model\.safetensors was changed while it was read"):
        list(body)


def test_block_scales_travel_with_their_weight(tmp_path: Path) -> None:
    """Wherever they are stored; scales of weights that are not there keep their place."""
    weights = {name: torch.zeros(8) for name in ("a.weight", "b.weight", "z.weight_scale_inv")}
    save_file(weights, tmp_path / "model-1.safetensors")
    save_file({f"{name}.weight_scale_inv": torch.ones(4) for name in "ba"}, tmp_path / "model-2.safetensors")
    result = [sorted(part.name for part in body.parts) for body in bodies(ranges_of(tmp_path), 32)]
    assert result == [
        ["a.weight", "a.weight_scale_inv"],
        ["b.weight", "b.weight_scale_inv"],
        ["z.weight_scale_inv"],
    ]

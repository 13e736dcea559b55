# SPDX-License-Identifier: Apache-2.0
"""What a rank makes of a file whose tensors are larger than its buffers, against the whole tensors."""

import hashlib
import json
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.update.contract.manifest import scale_name
from vllm_fp8ext.update.contract.rank_results import Accepted, RankProgress
from vllm_fp8ext.update.contract.regular_file import stamp_of
from vllm_fp8ext.update.contract.safetensors_header import file_tensors
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.transports.files import receiver
from vllm_fp8ext.update.worker import spec_cache
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.rank import Rank
from vllm_fp8ext.update.worker.spec_cache import SpecCache
from vllm_fp8ext.update.worker.stager import Stager

ROWS, COLUMNS = 900, 200
TARGETS = ("w", "c")


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """One whose model is a quantized weight for values, one for codes, and a norm; without a model around them."""
    monkeypatch.setattr(receiver, "READ_BYTES", 60_000)  # 128 rows of values, 256 of codes
    monkeypatch.setattr(receiver, "BUFFERS", 2)
    quantized = {}
    for name in TARGETS:
        codes, scales = quantize_weight.empty_like(torch.empty(ROWS, COLUMNS))
        quantized[name] = QuantizedTarget(codes, scales, torch.bfloat16, "fp32")
    shapes = {"w": (ROWS, COLUMNS), "c": (ROWS, COLUMNS), "norm": (COLUMNS,)}
    pieces = {
        name: (
            ShardSlice(
                0, name, shape, tuple((0, n) for n in shape), (0,) * len(shape), len(shape) == 2, "bfloat16"
            ),
        )
        for name, shape in shapes.items()
    }
    stager = Stager(pieces, quantized, {"norm": torch.zeros(COLUMNS, dtype=torch.bfloat16)})
    shadow: Any = SimpleNamespace(
        stager=stager, weight_swap=SimpleNamespace(pairs=[(torch.zeros(1), torch.zeros(1))])
    )
    return Rank(shadow, 0, 1, 0, lambda model, after: None)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)
    values = torch.randn(2, ROWS, COLUMNS, generator=noise).bfloat16()
    codes, scales = reference.quantize_weight(values[1], "fp32")
    return {"w": values[0], "c": codes, scale_name("c"): scales, "norm": torch.ones(COLUMNS).bfloat16()}


def written(tensors: dict[str, Tensor], file: Path) -> None:
    """A safetensors file in the order of the dict: codes before their scales."""
    header: dict[str, Any] = {}
    body = b""
    dtypes = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
    for name, tensor in tensors.items():
        data = tensor.view(torch.uint8).numpy().tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtypes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def staged(rank: Rank, file: Path, job: int, hashes: dict[str, str], session: str = "u") -> Any:
    listed = [[t.spec.name, list(t.spec.shape), t.spec.dtype, t.start, t.size] for t in file_tensors(file)]
    told = {"transport": "files", "path": str(file), "stamp": list(stamp_of(file.stat())), "folder": "/"}
    claimed = {name: [sha, [name]] for name, sha in hashes.items()}
    assert rank.stage(job, session, told, listed, claimed) == Accepted()
    while isinstance(result := rank.poll(job, 0.05), RankProgress):
        time.sleep(0.001)
    return result


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def test_larger_tensors_than_buffers_are_staged_bit_for_bit(
    rank: Rank, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    written(tensors, file)
    result = staged(rank, file, 1, {name: sha(tensor) for name, tensor in tensors.items()})
    assert result.problems == []
    targets = rank.shadow.stager.quantized
    expected = {
        "w": reference.quantize_weight(tensors["w"], "fp32"),
        "c": (tensors["c"], tensors[scale_name("c")]),
    }
    for name, pair in expected.items():
        for actual, wanted in zip((targets[name].codes, targets[name].scales), pair, strict=True):
            assert torch.equal(actual.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(rank.shadow.stager.plain["norm"], tensors["norm"])
    whole = quantize_weight.quantize_weight(tensors["w"], *quantize_weight.empty_like(tensors["w"]), "fp32")
    assert result.errors.keys() == {"w"}
    assert result.errors["w"] == pytest.approx(whole, rel=1e-6)


def test_everything_wrong_is_told_by_tensor(rank: Rank, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    tensors["w"][-1, 3] = torch.nan
    tensors[scale_name("c")][-1, 0] = -1.0
    written(tensors, file)
    result = staged(rank, file, 1, {"w": sha(tensors["w"]), "c": "0" * 64})
    actual = {(problem["kind"], problem["tensor"]) for problem in result.problems}
    assert actual == {("sha256-mismatch", "c"), ("non-finite", "w"), ("wrong-scales", "c")}


def test_another_ranks_codes_are_hashed_here_and_staged_nowhere(
    rank: Rank, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    """Of two ranks, each of which hashes every second tensor."""
    file = tmp_path / "a.safetensors"
    written(tensors, file)
    del rank.shadow.stager.pieces["c"]  # type: ignore[attr-defined]  # a dict here
    one = Rank(rank.shadow, 0, 2, 0, lambda model, after: None)
    claims = {"c": sha(tensors["c"]), scale_name("c"): sha(tensors[scale_name("c")])}
    assert staged(one, file, 1, claims).problems == []
    result = staged(one, file, 2, {**claims, "c": "0" * 64})
    assert [(problem["kind"], problem["tensor"]) for problem in result.problems] == [("sha256-mismatch", "c")]


def test_a_newer_update_ends_the_reading(rank: Rank, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    written(tensors, file)
    stager = rank.shadow.stager
    calls = []
    original = stager.stage

    def dropped_meanwhile(*arguments: Any) -> Any:
        calls.append(arguments)
        rank.drop("u")
        return original(*arguments)

    stager.stage = dropped_meanwhile  # type: ignore[method-assign]  # an update is given up while this one runs
    assert staged(rank, file, 1, {}).kind == "wrong-state"
    assert len(calls) == 1
    stager.stage = original  # type: ignore[method-assign]
    assert staged(rank, file, 2, {}, "v").problems == []


def test_what_is_told_again_is_the_same_object() -> None:
    """By which it is found what becomes of it."""
    cache = SpecCache()
    first, other = ([[name, [2], "bfloat16", 0, 4]] for name in "ab")
    spec = cache.stored(first)[0].spec
    assert cache.stored(other)[0].spec.name == "b"
    assert cache.stored([["a", [2], "bfloat16", 8, 4]])[0] == (spec, 8, 4)
    assert cache.stored(first)[0].spec is spec


def test_names_that_come_once_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of sparse updates, of which each has others."""
    monkeypatch.setattr(spec_cache, "KEPT", 20)
    cache = SpecCache()
    for update in range(10):
        names = [f"w[{row}:{row + 1},0:2]" for row in range(8 * update, 8 * update + 8)]
        stored = cache.stored([[name, [1, 2], "bfloat16", 0, 4] for name in names])
        assert [each.spec.name for each in stored] == names
    assert len(cache._specs) <= 20 + 8

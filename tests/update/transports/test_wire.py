# SPDX-License-Identifier: Apache-2.0
"""What a trainer sends as codes and block scales."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import NonFiniteError
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.transports.wire import quantized, require_all_quantizable, stored


def layout(form: str = "fp32", rows: int = 256) -> Manifest:
    """A server that takes `w` as codes, if its rows are whole blocks, and `norm` as it is."""
    tensors = {"w": TensorSpec("w", (rows, 256), "float32"), "norm": TensorSpec("norm", (256,), "bfloat16")}
    pieces = {
        "w": (ShardSlice(0, "t", (rows + 1, 256), ((0, rows), (0, 256)), (0, 0), True, "bfloat16"),),
        "norm": (ShardSlice(0, "norm", (256,), ((0, 256),), (0,), False, "bfloat16"),),
    }
    return Manifest(tensors, frozenset(), pieces, form, 1)


WEIGHT = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", ["fp32", "pow2"])
def test_they_are_those_of_the_server(form) -> None:
    norm = torch.ones(256)
    result = list(quantized([("w", WEIGHT), ("norm", norm), ("other", norm)], layout(form)))
    codes, scales = reference.quantize_weight(WEIGHT.bfloat16(), form)
    assert [name for name, _ in result] == ["w", "w_scale_inv", "norm", "other"]
    assert torch.equal(result[0][1].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(result[1][1], scales)
    assert result[2][1] is norm


def test_what_one_of_several_servers_does_not_take_is_left() -> None:
    unaligned = layout(rows=200)
    assert [name for name, _ in quantized([("w", WEIGHT)], layout(), unaligned)] == ["w"]
    codes, scales = reference.quantize_weight(WEIGHT)
    given = [("w", codes), ("w_scale_inv", scales)]
    assert list(quantized(given, layout())) == given


def test_what_can_not_be_quantized() -> None:
    with pytest.raises(ValueError, match="expected servers of one scale format, found fp32, pow2"):
        list(quantized([("w", WEIGHT)], layout(), layout("pow2")))
    with pytest.raises(ValueError, match="tensor w: expected a torch tensor to quantize, found ndarray"):
        list(quantized([("w", np.zeros((256, 256), np.float32))], layout()))
    for wrong, message in (
        (WEIGHT.to(torch.int8), "expected dtype bfloat16 or float16 or float32 to quantize, found int8"),
        (WEIGHT.to(torch.float8_e5m2), "found float8_e5m2"),
        (WEIGHT.to("meta"), "expected a dense tensor with values, found one on the meta device"),
        (WEIGHT.to_sparse(), "found layout torch.sparse_coo"),
        (WEIGHT[0], r"expected a matrix to quantize, found shape \[256\]"),
    ):
        given = [("norm", WEIGHT[0]), ("w", wrong)]
        with pytest.raises(ValueError, match=f"tensor w: .*{message}"):
            list(quantized(given, layout()))
        with pytest.raises(ValueError, match="tensor w: "):
            require_all_quantizable(given, layout())
    require_all_quantizable([("norm", np.zeros(256)), ("w", WEIGHT.half())], layout())
    with pytest.raises(NonFiniteError, match="tensors w: expected finite values"):
        next(quantized([("w", torch.full((256, 256), torch.nan))], layout()))


def test_scales_come_right_after_their_weights_wherever_they_are_stored(tmp_path: Path) -> None:
    names = [["a.weight", "b.weight"], ["b.weight_scale_inv", "a.weight_scale_inv", "c"]]
    for file, held in enumerate(names):
        save_file({name: torch.ones(1) for name in held}, tmp_path / f"{file}.safetensors")
    result = [name for name, _ in stored(tmp_path)]
    assert result == ["a.weight", "a.weight_scale_inv", "b.weight", "b.weight_scale_inv", "c"]


def test_every_dtype_is_read_as_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32]
    dtypes += [torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2]
    values = torch.arange(48, dtype=torch.uint8)
    tensors = {
        str(dtype): (values % 2 if dtype == torch.bool else values.clone()).view(dtype).reshape(2, -1)
        for dtype in dtypes
    }
    save_file(tensors | {"none": torch.empty(0, 3), "one": torch.tensor(2.0)}, tmp_path / "all.safetensors")
    actual, wanted = dict(stored(tmp_path, "cpu")), load_file(tmp_path / "all.safetensors")
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape)
        raw = (value.reshape(-1).view(torch.uint8) for value in (actual[name], tensor))
        assert torch.equal(*raw)


def test_a_dtype_that_torch_has_not_is_named(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(3))
    with pytest.raises(ValueError, match="tensor a: expected a dtype that torch has, found F6_E2M3"):
        list(stored(tmp_path, "cpu"))


def test_checkpoints_are_read_tensor_by_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(3), "c": torch.ones(1)}, tmp_path / "2.safetensors")
    assert [(name, tensor.tolist()) for name, tensor in stored(tmp_path)] == [
        ("a", [1, 1]),
        ("b", [0, 0, 0]),
        ("c", [1]),
    ]
    assert [name for name, _ in stored(tmp_path / "1.safetensors")] == ["a"]

# SPDX-License-Identifier: Apache-2.0
"""Tensors of a file, or of the shared buffer of uploads, staged into a shadow on a GPU."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.update.contract.rank_results import StagedTensors
from vllm_fp8ext.update.contract.regular_file import stamp_of
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor, parse
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.transports.files.message import FileSource
from vllm_fp8ext.update.transports.gather import Gather
from vllm_fp8ext.update.transports.http.message import UploadSource
from vllm_fp8ext.update.transports.transport import Source
from vllm_fp8ext.update.worker.intake import Intake
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.stager import Stager

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
ROOM = 4 << 20
SHAPES = {
    **{f"even{number}": (768, 512) for number in range(9)},  # several groups
    "large": (6000, 1024),  # by itself, in parts
    "odd": (200, 300),
    "norm": (4096,),
}


def save(path: Path, seed: int) -> tuple[dict[str, Tensor], list[StoredTensor]]:
    noise = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=noise).bfloat16() for name, shape in SHAPES.items()}
    save_file(weights, path)
    content = path.read_bytes()
    return weights, parse(lambda start, size: content[start : start + size], len(content), "file")


def stager() -> Stager:
    pieces, quantized, plain = {}, {}, {}
    for name, shape in SHAPES.items():
        whole = tuple((0, size) for size in shape)
        pieces[name] = (ShardSlice(0, name, shape, whole, (0,) * len(shape), len(shape) == 2, "bfloat16"),)
        if len(shape) == 2:
            codes, scales = quantize_weight.empty_like(torch.empty(shape, device=DEVICE))
            quantized[name] = QuantizedTarget(codes, scales, torch.bfloat16, "fp32")
        else:
            plain[name] = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    return Stager(pieces, quantized, plain)


KEPT: list[Intake] = []
"""Their shared buffers are page-locked: they stay mapped."""


def intake_of(targets: Stager) -> Intake:
    intake = Intake(SimpleNamespace(stager=targets), 0, 1, DEVICE)  # type: ignore[arg-type]  # all that it looks at
    KEPT.append(intake)
    torch.cuda.synchronize()  # what is staged comes after what made its place
    intake._receivers._rank.gather = Gather(DEVICE, ROOM)
    intake.want("u")
    return intake


def staged(intake: Intake, source: Source, tensors: list[StoredTensor]) -> StagedTensors:
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        told = intake.stage(1, "u", source, tensors, {})
        torch.cuda.current_stream().synchronize()
    assert isinstance(told, StagedTensors)
    return told


@pytest.fixture
def memory() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("way", ["file", "buffer", "buffer on a disk"])
def test_a_checkpoint_is_staged_as_the_reference_quantizes_it(way: str, tmp_path: Path, memory: Path) -> None:
    """What lies on a disk can't be page-locked."""
    targets = stager()
    intake = intake_of(targets)
    for seed in (1, 2):
        path = (memory if way == "buffer" else tmp_path) / f"{seed}.safetensors"
        weights, tensors = save(path, seed)
        source = FileSource(str(path), stamp_of(path.stat())) if way == "file" else UploadSource(str(path))
        told = staged(intake, source, tensors)
        assert not told.problems
        assert intake.progress == {1: len(SHAPES)}
        for name, weight in weights.items():
            if name in targets.plain:
                assert torch.equal(targets.plain[name].cpu(), weight)
                continue
            codes, scales = reference.quantize_weight(weight, "fp32")
            result = targets.quantized[name]
            assert torch.equal(result.codes.cpu().view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(result.scales.cpu(), scales), name
            error = (weight.float() - reference.dequantize_weight(codes, scales)).square().sum()
            assert told.errors[name][0] == pytest.approx(float(error), rel=1e-3)


@pytest.mark.parametrize("name", ["even4", "large", "odd", "norm"])
def test_what_is_not_finite_is_told_of_its_tensor(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weights, _ = save(path, 1)
    weights[name].view(-1)[-1] = float("inf")
    save_file(weights, path)
    content = path.read_bytes()
    tensors = parse(lambda start, size: content[start : start + size], len(content), "file")
    intake = intake_of(stager())
    told = staged(intake, FileSource(str(path), stamp_of(path.stat())), tensors)
    assert [(problem["kind"], problem["tensor"]) for problem in told.problems] == [("non-finite", name)]

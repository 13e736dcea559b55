# SPDX-License-Identifier: Apache-2.0
"""What a trainer quantizes on its GPU before it sends it."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import NonFiniteError
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec, scale_name
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.transports.wire import quantized

pytestmark = pytest.mark.gpu

NAMES = ("a", "b", "c")
SHAPE = (512, 768)


@pytest.fixture
def manifest() -> Manifest:
    whole = tuple((0, size) for size in SHAPE)
    pieces = {name: (ShardSlice(0, name, SHAPE, whole, (0, 0), True, "bfloat16"),) for name in NAMES}
    tensors = {name: TensorSpec(name, SHAPE, "bfloat16") for name in NAMES}
    return Manifest(tensors, frozenset(), pieces, "fp32", 1)


@pytest.fixture
def nothing_waits() -> Iterator[None]:
    """Whatever waits for the GPU fails."""
    torch.ones(1, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode does not see all of it
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def weights(device: str = "cuda") -> dict[str, torch.Tensor]:
    noise = torch.Generator(device).manual_seed(0)
    return {name: torch.randn(SHAPE, generator=noise, device=device).bfloat16() for name in NAMES}


def test_it_waits_for_nothing_until_all_are_there(manifest: Manifest, nothing_waits: None) -> None:
    given = weights()
    made = quantized(given.items(), manifest)
    tensors = dict(next(made) for _ in range(2 * len(NAMES)))
    torch.cuda.set_sync_debug_mode("default")
    assert next(made, None) is None
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1, (
        "one handle for all"
    )
    for name, weight in given.items():
        codes, scales = reference.quantize_weight(weight.cpu(), "fp32")
        assert torch.equal(tensors[name].cpu().view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(tensors[scale_name(name)].cpu(), scales)


def test_what_is_not_finite_is_told_of_its_tensors(manifest: Manifest) -> None:
    given = weights()
    given["b"][7, 9] = torch.inf
    made = quantized(given.items(), manifest)
    assert len([next(made) for _ in range(2 * len(NAMES))]) == 2 * len(NAMES)
    with pytest.raises(NonFiniteError, match="tensors b: expected finite values"):
        next(made)


@pytest.mark.multigpu
@pytest.mark.parametrize("bad", [False, True])
def test_weights_on_another_gpu_than_the_current_one(manifest: Manifest, bad: bool) -> None:
    """On a stream that is current only while they are made."""
    given = weights("cuda:1")
    if bad:
        given["c"][0, 0] = torch.nan
    torch.cuda.synchronize("cuda:1")
    made = quantized(given.items(), manifest)
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        torch.cuda._sleep(100_000_000)
        result = [next(made) for _ in range(2 * len(NAMES))]
    torch.cuda.set_device(0)
    assert {tensor.device.index for _, tensor in result} == {1}
    if bad:
        with pytest.raises(NonFiniteError, match="tensors c: expected finite values"):
            next(made)
    else:
        assert next(made, None) is None

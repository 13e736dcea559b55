# SPDX-License-Identifier: Apache-2.0
"""Tensors on a GPU on their way into the body of a request."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.serve import tensors
from vllm_fp8ext.serve.tensors import tensor_parts

pytestmark = pytest.mark.gpu


def fetched(tensor: Tensor) -> Tensor:
    """What another thread finds in it, as bytes."""
    [part] = tensor_parts([("a", tensor)], ["bfloat16", "float32"])
    with ThreadPoolExecutor(1) as threads:
        host = threads.submit(part.fetched).result()
    assert host.size == part.size
    return torch.frombuffer(bytearray(b"".join(host.pieces())), dtype=torch.uint8)


def expected(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("most", [0, 256 << 20])
@pytest.mark.parametrize("turned", [False, True])
def test_a_copy_has_the_tensors_bytes(most: int, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MOST_PINNED_BYTES", most)
    tensor = torch.randn(700, 1100, device="cuda").bfloat16()
    tensor = tensor.T if turned else tensor
    assert torch.equal(fetched(tensor), expected(tensor))


def test_what_the_callers_stream_still_computes_is_waited_for() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(500_000_000)  # some tenths of a second
        tensor.fill_(3.0)
        result = fetched(tensor)
    assert torch.equal(result.view(torch.float32), torch.full((1 << 20,), 3.0))


def test_a_copy_is_page_locked() -> None:
    tensor = torch.ones(1 << 20, device="cuda")
    host, copied = tensors._from_gpu(tensor, torch.cuda.current_stream())
    copied.synchronize()
    assert host.is_pinned()
    assert not host.is_cuda

# SPDX-License-Identifier: Apache-2.0
"""Tensors that are handed over where they are: what is refused before a GPU is asked."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from vllm_fp8ext.serve.client.lent import Pairs
from vllm_fp8ext.serve.client.transports.ipc import handles

from .conftest import Caller
from .server import Server


@pytest.mark.parametrize(
    ("tensor", "kind"), [(torch.ones(2), "cpu"), (np.ones(2, np.float32), "ndarray|cpu"), ("text", "str")]
)
def test_only_tensors_on_a_gpu(tensor, kind: str) -> None:
    with pytest.raises(ValueError, match=f"tensor w: expected a torch tensor on a GPU, found ({kind})"):
        list(handles.batches([("w", tensor)], 100))


@pytest.mark.parametrize("limit", [40, 80, 1000])
def test_what_is_lent_is_copied_unless_it_is_read_at_once(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """One that fills a chunk by itself is read before the next one is asked for."""
    monkeypatch.setattr(handles, "torch_tensor", lambda name, tensor, *devices: tensor)
    buffer = torch.empty(10)

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for n in range(6):
            yield f"w{n}", buffer.fill_(n)
            buffer.fill_(-1)

    pairs = Pairs(made())
    collected = []
    for group in handles.batches(pairs, limit, pairs.lent):
        assert len(group) == min(limit // 40, 6)
        collected += [tensor[0].item() for _, tensor in group]
        assert all((tensor.data_ptr() == buffer.data_ptr()) == (limit == 40) for _, tensor in group)
    assert collected == list(range(6))


def test_codes_that_are_lent_stay_beside_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large they are."""
    monkeypatch.setattr(handles, "torch_tensor", lambda name, tensor, *devices: tensor)
    codes, scales = torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
    pairs = Pairs(iter([("a.weight", codes), ("a.weight_scale_inv", scales), ("b.weight", codes)]))
    groups = [[name for name, _ in group] for group in handles.batches(pairs, 1, pairs.lent)]
    assert groups == [["a.weight", "a.weight_scale_inv"], ["b.weight"]]


def test_nothing_is_left_open(caller: Caller, server: Server) -> None:
    with pytest.raises(ValueError, match="expected a torch tensor on a GPU"):
        caller(server.url, "push", {"w": torch.ones(2)}, transport="ipc")
    assert server.states == ["abandoned"]


def test_a_transport_that_is_none(caller: Caller, server: Server) -> None:
    with pytest.raises(ValueError, match="transport: expected http, ipc, nccl, files, found 'pigeon'"):
        caller(server.url, "push", {"w": torch.ones(2)}, transport="pigeon")
    assert server.calls == []

# SPDX-License-Identifier: Apache-2.0
"""The binding to NCCL, as far as it can be tried without a GPU. `tests/gpu/test_broadcast.py` has the rest."""

import ctypes

import pytest
import torch

from vllm_fp8ext.kernels.runtime import nccl
from vllm_fp8ext.kernels.runtime.nccl import ID_BYTES, Communicator, NcclError, unique_id


@pytest.fixture
def id() -> bytes:
    try:
        return unique_id()
    except NcclError as error:
        pytest.skip(str(error))


def test_the_layout_of_the_structures() -> None:
    """As in nccl.h of NCCL 2.14: a size_t, two unsigned, one int, up to a multiple of eight bytes."""
    config = nccl._Config
    assert [getattr(config, name).offset for name, _ in config._fields_] == [0, 8, 12, 16, 20]
    assert (ctypes.sizeof(config), ctypes.sizeof(nccl._Id)) == (24, 128)


def test_an_id_of_another_length() -> None:
    with pytest.raises(ValueError, match="expected an id of 128 bytes, found 3"):
        Communicator(b"abc", 2, 0)


def test_ids_differ(id: bytes) -> None:
    assert len(id) == ID_BYTES
    assert id != unique_id()


def test_errors_say_what_nccl_says(id: bytes) -> None:
    with pytest.raises(NcclError, match=r"ncclCommInitRankConfig: .+ \(\d+\)"):
        Communicator(id, 2, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_communicator_needs_a_gpu(id: bytes) -> None:
    with pytest.raises(NcclError, match="ncclCommInitRankConfig: "):
        Communicator(id, 2, 0)

# SPDX-License-Identifier: Apache-2.0
"""Updates that bring some layers: the others keep what is served."""

from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError

from .ask import state
from .conftest import FIRST

ATTENTION = "model.layers.1.self_attn."
CHOSEN = (
    *(f"{ATTENTION}{name}_proj.weight" for name in "qkv"),
    "model.layers.2.mlp.down_proj.weight",
    "model.norm.weight",
)
"""A fused layer, one that is not, and a norm."""


@pytest.fixture(scope="module")
def late() -> dict[str, Tensor]:
    return load_file(LATE / "model.safetensors")


def some(tensors: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}


@FIRST
def test_what_is_not_sent_stays(server: Server, late: dict[str, Tensor]):
    with server.client() as client:
        whole = client.push(late, version="late")
        assert whole.result is not None
        new = client.digests().digests
        client.rollback()
        before = client.digests()
        update = client.push(
            some(late, *CHOSEN), version="mixed", partial=True, base_epoch=before.epoch, chunk_bytes=1 << 17
        )
        assert (update.partial, update.tensors_required) == (True, len(CHOSEN))
        after = client.digests()
        assert (after.epoch, after.version) == (before.epoch + 1, "mixed")
        assert after.addresses == before.addresses
        assert after.digests == {
            name: (new if name in CHOSEN else before.digests)[name] for name in before.digests
        }
        assert client.rollback().epoch == before.epoch + 2
        assert client.digests().digests == before.digests
        client.push(late, version="late")
        assert client.digests().digests == new


def test_what_is_refused(single: Server, late: dict[str, Tensor]):
    before = state(single)
    with single.client() as client:
        with pytest.raises(UpdateError, match="needs base_epoch") as refused:
            client.open(partial=True)
        assert (refused.value.kind, refused.value.status) == ("invalid-request", 422)
        with pytest.raises(UpdateError, match="lacks 2 of 3 tensors") as refused:
            client.push(some(late, f"{ATTENTION}q_proj.weight"), partial=True, base_epoch=before["epoch"])
        assert refused.value.kind == "incomplete"
        assert refused.value.details["missing"] == [f"{ATTENTION}{name}_proj.weight" for name in "kv"]
        id = client.open(partial=True, base_epoch=before["epoch"]).id
        with pytest.raises(UpdateError, match="brings nothing"):
            client.commit(id)
        spoiled = {CHOSEN[-1]: torch.full((256,), torch.nan, dtype=torch.bfloat16)}
        client.put_chunk(id, 0, *_body(some(late, CHOSEN[-2])))
        with pytest.raises(UpdateError, match="non-finite"):
            client.put_chunk(id, 1, *_body(spoiled))
        with pytest.raises(UpdateError, match="lacks 1 of 2 tensors"):
            client.commit(id)
        client.abandon(id)
    assert state(single) == before


def test_what_was_announced_must_come(single: Server, late: dict[str, Tensor]):
    with single.client() as client:
        epoch = client.weights().epoch
        id = client.open(partial=True, base_epoch=epoch, tensors={CHOSEN[-1]: {}, CHOSEN[-2]: {}}).id
        client.put_chunk(id, 0, *_body(some(late, CHOSEN[-2])))
        assert client.update(id).missing == [CHOSEN[-1]]
        with pytest.raises(UpdateError, match="lacks 1 of 2 tensors"):
            client.commit(id)
        client.put_chunk(id, 1, *_body(some(late, CHOSEN[-1])))
        assert client.commit(id).state == "committed"
        client.rollback()


def _body(tensors: dict[str, Tensor]) -> tuple[bytes, int]:
    from safetensors.torch import save

    body = save(tensors)
    return body, len(body)

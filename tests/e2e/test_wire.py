# SPDX-License-Identifier: Apache-2.0
"""Updates that come as codes and block scales."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.schema import Allocation, Handles, IpcTensor
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, Manifest, scale_name
from vllm_fp8ext.update.transports.wire import quantized

from .ask import state

OUT = "model.layers.0.self_attn.o_proj.weight"
"""Taken as codes by one rank and by two; 256 x 256."""
KEY = "model.layers.0.self_attn.k_proj.weight"
"""128 rows: whole blocks on one rank, half of one on each of two."""


@pytest.fixture(scope="module")
def late() -> dict[str, Tensor]:
    return load_file(LATE / "model.safetensors")


def codes_of(tensors: dict[str, Tensor], server: Server, *names: str) -> dict[str, Tensor]:
    with server.client() as client:
        manifest = Manifest.from_dict(client.manifest())
    return dict(quantized(((name, tensors[name]) for name in names), manifest))


def test_the_same_bytes_are_served(
    server: Server, servers: dict[str, Server], late: dict[str, Tensor], tmp_path: Path
):
    with server.client() as client:
        manifest = Manifest.from_dict(client.manifest())
        assert manifest.takes_codes(OUT)
        assert manifest.takes_codes(KEY) == (server is servers["tp1"])
        assert not manifest.takes_codes("model.norm.weight")
        plain = client.push(LATE, version="late")
        wanted = client.digests().digests
        client.rollback()
        sent = client.push(LATE, version="late", fp8=True, chunk_bytes=1 << 17)
        assert client.digests().digests == wanted
        assert sent.tensors_missing == 0
        assert sent.bytes < (0.75 if server is servers["tp1"] else 1) * plain.bytes
        client.rollback()
        # as a trainer holds it whose embedding is the output layer, too, which is not sent
        tied = {**late, "lm_head.weight": late["model.embed_tokens.weight"]}
        assert client.push(tied, version="late").bytes <= plain.bytes
        assert client.digests().digests == wanted
        client.rollback()
        # as a checkpoint on disk, all the scales behind all the weights
        both = dict(quantized(late.items(), manifest))
        scales = {name: both.pop(name) for name in list(both) if name.endswith("_scale_inv")}
        save_file(both, tmp_path / "model-1.safetensors")
        save_file(scales, tmp_path / "model-2.safetensors")
        client.push(tmp_path, version="late", chunk_bytes=1 << 17)
        assert client.digests().digests == wanted


def test_what_is_refused(single: Server, late: dict[str, Tensor]):
    before = state(single)
    good = codes_of(late, single, OUT)
    codes, scales = good[OUT], good[scale_name(OUT)]
    assert str(codes.dtype).endswith(CODES_DTYPE)
    nan = codes.clone()
    nan.view(torch.uint8)[3, 5] = 0xFF
    cases = {
        "missing-scales": {OUT: codes},
        "wrong-shape": {OUT: codes, scale_name(OUT): scales[:1].contiguous()},
        "wrong-dtype": {OUT: codes, scale_name(OUT): scales.bfloat16()},
        "unknown-tensor": {OUT: late[OUT], scale_name(OUT): scales},
        "non-finite": {OUT: nan, scale_name(OUT): scales},
        "wrong-scales": {OUT: codes, scale_name(OUT): -scales},
    }
    norm = "model.norm.weight"
    with single.client() as client:
        id = client.open().id
        for kind, tensors in cases.items():
            body = save(tensors)
            with pytest.raises(UpdateError) as refused:
                client.put_chunk(id, 0, body, len(body))
            assert (refused.value.kind, refused.value.status) == (kind, 422), refused.value
        body = save({norm: late[norm].to(codes.dtype), scale_name(norm): torch.ones(2)})
        with pytest.raises(UpdateError) as refused:
            client.put_chunk(id, 0, body, len(body))
        assert [problem["kind"] for problem in refused.value.details["problems"]] == ["wrong-dtype"]
        client.abandon(id)
    assert state(single) == before


def test_handles_need_a_gpu(single: Server):
    """Told as any other refusal; the same chunk may come over HTTP then."""
    before = state(single)
    allocation = Allocation(handle="A" * 86 + "==", bytes=1024)
    tensor = IpcTensor(name="model.norm.weight", dtype="bfloat16", shape=[256], allocation=0, offset=0)
    with single.client() as client:
        id = client.open().id
        body = Handles(n=0, device="none", allocations=[allocation], tensors=[tensor])
        with pytest.raises(UpdateError, match="expected a GPU that the server sees, found none") as refused:
            client.handles(id, body)
        assert (refused.value.kind, refused.value.status) == ("bad-handle", 422)
        beyond = tensor.model_copy(update={"offset": 1024})
        with pytest.raises(UpdateError, match="do not lie in allocation 0 of 1024 bytes"):
            client.handles(id, body.model_copy(update={"tensors": [beyond]}))
        unknown = tensor.model_copy(update={"name": "stranger"})
        with pytest.raises(UpdateError, match="stranger"):
            client.handles(id, body.model_copy(update={"tensors": [unknown]}))
        whole = (LATE / "model.safetensors").read_bytes()
        client.put_chunk(id, 0, whole, len(whole))
        client.abandon(id)
    assert state(single) == before

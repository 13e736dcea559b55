# SPDX-License-Identifier: Apache-2.0
"""The flow that sends a part of an update: trainers' processes may hold a part of the weights each."""

from typing import Any

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.everywhere import on_one
from vllm_fp8ext.serve.client.flow import Endpoint, Flow
from vllm_fp8ext.serve.client.lent import end
from vllm_fp8ext.serve.client.options import PushOptions
from vllm_fp8ext.serve.client.source import Pushable, source_of
from vllm_fp8ext.serve.client.transports.http.chunks import Numbering, send_chunks

_OPTIONS = ("chunk_bytes", "chunks_in_flight", "checksum", "fp8", "progress")


def send(
    endpoint: Endpoint, /, id: str, weights: Pushable, *, part: int = 0, parts: int = 1, **options: Any
) -> Flow[schema.Update]:
    """Send weights over HTTP as a part of an open update, and return the update. Nothing is committed.

    Of `parts` senders, each of which sends other tensors, or other slices of them (`slice_name`, `local_slices`), this one is
    number `part`, from 0. Their chunks do not meet. Keywords are `chunk_bytes`, `chunks_in_flight`, `checksum`, `fp8` and
    `progress` of `PushOptions`. The update stays open when this fails.

    Raises:
        ValueError: as `Client.push`; a part that is none of `parts`; another keyword.
        UpdateError: a refusal, `wrong-slice` say.
    """
    wrong = sorted(options.keys() - set(_OPTIONS))
    if wrong:
        raise ValueError(f"send: expected {', '.join(_OPTIONS)}, found {', '.join(wrong)}")
    if not 0 <= part < parts:
        raise ValueError(f"send: expected a part from 0 to {parts - 1}, found {part}")
    push_options = PushOptions(**options)

    def manifests() -> Flow[list[dict[str, Any]]]:
        return [(yield from calls.manifest(endpoint))]

    source = yield from source_of(weights, manifests, fp8=push_options.fp8)
    yield from calls.update(endpoint, id)  # there is one: opening would make it
    update = yield from calls.open(endpoint, id=id)
    try:
        yield from send_chunks(
            {endpoint: update}, source, push_options, on_one, numbering=Numbering(part, parts)
        )
    except BaseException:
        end(weights)
        raise
    return (yield from calls.update(endpoint, id))

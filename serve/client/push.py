# SPDX-License-Identifier: Apache-2.0
"""The flow that sends weights to one server and commits them."""

import contextlib
import uuid
from dataclasses import replace
from typing import Any

import httpx

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.everywhere import on_one
from vllm_fp8ext.serve.client.flow import Endpoint, Flow
from vllm_fp8ext.serve.client.lent import end
from vllm_fp8ext.serve.client.options import ClientPushOptions
from vllm_fp8ext.serve.client.repeat import lost_by, undecided, unsent
from vllm_fp8ext.serve.client.source import Pushable
from vllm_fp8ext.serve.client.transports.registry import SENDERS

ABANDON_SECONDS = 10.0
"""Longest time without an answer when an update is given up after an error."""


def push(endpoint: Endpoint, weights: Pushable, /, options: ClientPushOptions) -> Flow[schema.Update]:
    """Send weights and commit them: a checkpoint's path, a mapping of names to tensors, or an iterable of such pairs.

    Tensors of a `dict` stay as they are until this returns. What any other iterable yields is copied before it is asked for
    more (on a GPU on the current stream), so that it may change the tensor then.

    Keywords are the fields of `ClientPushOptions`, which says what each means. A refused update is abandoned, and so is one
    that is given up on this side; no chunk is under way any more when this raises.

    Raises:
        ValueError: a checkpoint that can't be read, a tensor that can't be sent, or an option that is not what it should be.
        UpdateError: a refusal; or `interrupted`, with `details["id"]`: an answer was lost, and the update stays open, or is
            committed.
        httpx.HTTPError: the server can't be reached; no update was opened.
    """

    def manifests() -> Flow[list[dict[str, Any]]]:
        return [(yield from calls.manifest(endpoint))]

    sender = yield from SENDERS[options.transport].prepare(weights, options, manifests)
    id = options.id or uuid.uuid4().hex
    update = yield from _open(endpoint, id, options)
    if update.state == "committed":
        yield from sender.send({}, on_one, (update,))
        return update
    committing = False
    try:
        yield from sender.send({endpoint: update}, on_one)
        if not options.commit:
            return (yield from calls.prepare(endpoint, id))
        committing = True
        patience = calls.patience(options.running, options.wait_seconds)
        return (yield from calls.commit(endpoint, id, wait_seconds=patience))
    except BaseException as error:
        end(weights)
        if lost_by(endpoint, error) or (committing and undecided(error)):
            raise _interrupted(endpoint, id, error) from error
        yield from abandon_quietly(endpoint, id)
        raise


def _open(endpoint: Endpoint, id: str, options: ClientPushOptions) -> Flow[schema.Update]:
    """Open the update. One that may have been opened without our knowledge is not left open."""
    try:
        return (yield from calls.open(endpoint, **options.opening(), instance=options.instance, id=id))
    except (UpdateError, httpx.TransportError) as error:
        if lost_by(endpoint, error) and not unsent(error):
            raise _interrupted(endpoint, id, error) from error
        raise
    except (Exception, GeneratorExit):
        raise
    except BaseException:  # given up: it may have been opened all the same
        yield from abandon_quietly(endpoint, id)
        raise


def abandon_quietly(endpoint: Endpoint, id: str) -> Flow[None]:
    """Give an update up after an error. That error is the one to report, whatever comes of this, and nobody waits long for a
    server that does not answer."""
    briefly = replace(
        endpoint, timeout=min(endpoint.timeout, ABANDON_SECONDS), retries=min(endpoint.retries, 1)
    )
    with contextlib.suppress(UpdateError, httpx.HTTPError):
        yield from calls.abandon(briefly, id)


def _interrupted(endpoint: Endpoint, id: str, error: BaseException) -> UpdateError:
    message = (
        f"{endpoint.url}: no answer ({error or type(error).__name__}). Update {id} may still be open: "
        f"push the same weights with id={id!r} (fp8ext push --resume {id}) to go on, or abandon it"
    )
    return UpdateError("interrupted", message, status=503, id=id)

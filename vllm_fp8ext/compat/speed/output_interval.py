# SPDX-License-Identifier: Apache-2.0
"""Sends several tokens of a request in one message where its client waits anyway.

vLLM's engine core sends one message a step with one output a request. Each output is encoded, decoded and processed
alone: with 128 requests the API server's process spends more time on that than the GPU on the tokens. Here an output
that holds only tokens and logprobs is held until there are `interval` tokens, or the request ends. First tokens are
sent at once. Of streams, `stream_interval` tokens are sent together where steps are so short that the API server is
late otherwise, part of the streams in each step. `get` of the engine core's output queue is replaced on an instance:
the thread of the sockets does the work, and steps do not wait for it. `update_from_output` counts one inter-token latency for
each output.
"""

import itertools
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists

from vllm_fp8ext.compat.speed.packed_logprobs import pack
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.config import ServingSettings

FEATURE: str = "output_interval"
WHY: str = (
    "Send several tokens of a request in one message: vLLM encodes, decodes and processes each output alone."
)
GAIN: str = "the API server's share of a step with 128 requests; no engine measured apart"
REPLACES: tuple[str, ...] = (
    "vllm.v1.engine.core:EngineCoreProc.output_queue",
    "vllm.v1.metrics.stats:IterationStats.update_from_output("
    "output, engine_core_timestamp, is_prefilling, req_stats)",
)
USES: dict[str, tuple[str, ...]] = {
    "send several tokens of a request in one message": (
        "vllm.v1.engine:EngineCoreOutputs(outputs, weight_version)",
        "vllm.v1.outputs:LogprobsLists(logprob_token_ids, logprobs, sampled_token_ranks)",
        "vllm.sampling_params:RequestOutputKind.FINAL_ONLY",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's engine core does that for `FINAL_ONLY` requests"
SWITCH: tuple[str, object] = ("serving.output_interval", 1)

UNCHANGED = ServingSettings(output_interval=1, stream_interval=1, flat_logprobs=False)
"""Settings with which messages are vLLM's."""
PART_SECONDS = 1e-4
"""Seconds of a step for each stream, from which on tokens are sent alone.

It is twice what the API server needs for a part.
"""
LONGEST_SECONDS = 0.5
"""Seconds after which held tokens are sent, so that metrics of slow engines stay current."""


def attach(core: Any, settings: ServingSettings) -> None:
    """Have an `EngineCoreProc` hold outputs back and pack logprobs; nothing changes in an engine without a queue."""
    queue = getattr(core, "output_queue", None)
    if queue is None or settings == UNCHANGED:
        return
    ready: deque[Any] = deque()
    holder = OutputHolder(
        core.scheduler.requests,
        _packing(ready.append) if settings.flat_logprobs and not _rust_front_end() else ready.append,
        interval=settings.output_interval,
        many_streams_interval=settings.stream_interval,
        stream_interval=core.vllm_config.scheduler_config.stream_interval,
    )
    take = queue.get

    def get(*args: Any, **kwargs: Any) -> Any:
        while not ready:
            holder.put(take(*args, **kwargs))
        return ready.popleft()

    queue.get = get


def _packing(put: Callable[[Any], None]) -> Callable[[Any], None]:
    def pack_and_put(item: Any) -> None:
        if isinstance(item, tuple):
            pack(item[1].outputs)
        put(item)

    return pack_and_put


def _rust_front_end() -> bool:
    """Tell whether vLLM's front end is not Python: it would not unpack."""
    return os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0")


def install() -> None:
    """Have the API server's statistics count every token of an output. Idempotent."""
    wrap(IterationStats, "update_from_output", _wrap_update_from_output)


def _wrap_update_from_output(original: Any) -> Any:
    def update(
        self: Any, output: Any, timestamp: float, is_prefilling: bool, stats: Any, *lora: Any, **others: Any
    ) -> None:
        tokens = len(output.new_token_ids)
        if is_prefilling or output.events is not None or output.num_nans_in_logits or not tokens:
            return original(self, output, timestamp, is_prefilling, stats, *lora, **others)
        self.num_generation_tokens += tokens
        stats.num_generation_tokens += tokens
        latency = (timestamp - stats.last_token_ts) / tokens
        self.inter_token_latencies_iter.extend([latency] * tokens)
        stats.last_token_ts = timestamp

    return update


@dataclass(slots=True)
class _Held:
    """Outputs of one request that were not sent yet."""

    client: int
    output: Any
    """The first one, with the tokens of all."""
    logprobs: list[Any]
    target: int
    """Tokens with which they are sent."""
    usual: int
    """Tokens with which they are sent where the API server has time."""
    since: float


class OutputHolder:
    """Passes on each `(client_index, EngineCoreOutputs)` of an engine core, as much as is due.

    Tokens are sent with the weight version that sampled them: what is held goes out before a message of another version.
    """

    def __init__(
        self,
        requests: Any,
        put: Callable[[Any], None],
        *,
        interval: int,
        many_streams_interval: int = 1,
        stream_interval: int = 1,
    ) -> None:
        self._requests = requests
        """The scheduler's requests, by id."""
        self._put = put
        self._interval = interval
        self._many_streams_interval = many_streams_interval
        self._stream_interval = stream_interval
        self._busy = False
        """Parts of streams would come faster than the API server can take them."""
        self._steps = 0
        self._before: dict[int, float] = {}
        """When the last tokens for each client were there, by its index."""
        self._held: dict[str, _Held] = {}
        self._version: str | None = None
        self._phases = itertools.cycle(range(1, interval + 1))
        self._swept = 0.0

    def put(self, item: Any) -> None:
        """Queue a message, with what was held for it and without what is held now."""
        if not isinstance(item, tuple):  # the engine's end
            self.flush()
            return self._put(item)
        client, message = item
        if message.outputs:
            if message.weight_version != self._version:
                self.flush()
                self._version = message.weight_version
            now = message.timestamp
            self._steps += 1
            self._busy = len(message.outputs) * PART_SECONDS > now - self._before.get(client, float("-inf"))
            self._before[client] = now
            message.outputs = [
                output
                for produced in message.outputs
                if (output := self._take(client, produced, now)) is not None
            ]
            if now > self._swept + LONGEST_SECONDS / 2:
                self._swept = now
                self.flush(now - LONGEST_SECONDS)
        if message.outputs or not _is_empty(message):
            self._put(item)

    def flush(self, before: float = float("inf")) -> None:
        """Send what is held since `before` (monotonic seconds), with the version that sampled it."""
        messages: dict[int, list[Any]] = {}
        for name, held in list(self._held.items()):
            if held.since <= before:
                del self._held[name]
                messages.setdefault(held.client, []).append(_joined(held))
        for client, outputs in messages.items():
            self._put((client, EngineCoreOutputs(outputs=outputs, weight_version=self._version)))

    def _take(self, client: int, output: Any, now: float) -> Any:
        """Return what is to be sent of a request now: None, or an output with all its tokens."""
        name, plain = output.request_id, is_plain(output)
        held = self._held.get(name)
        if held is None:
            target, usual = self._targets(name) if plain else (0, 0)
            if target <= len(output.new_token_ids):
                return output
            output.new_token_ids = list(output.new_token_ids)
            self._held[name] = _Held(client, output, [output.new_logprobs], target, usual, now)
            return None
        if not plain:
            del self._held[name]
            return _before(held, output)
        held.output.new_token_ids += output.new_token_ids
        held.logprobs.append(output.new_logprobs)
        enough = held.target if self._busy else held.usual
        if len(held.output.new_token_ids) < enough:
            return None
        del self._held[name]
        return _joined(held)

    def _targets(self, name: str) -> tuple[int, int]:
        """Choose how many tokens are sent together, also where the API server has time.

        Those whose client sees every token, or a stop string of whose the API server looks for, are sent one by one.
        """
        request = self._requests.get(name)
        params = request.sampling_params if request is not None else None
        if params is None or params.stop or request.resumable:
            return 1, 1
        if params.output_kind == RequestOutputKind.FINAL_ONLY:
            # requests that came together are not to be sent together
            first = request.num_output_tokens <= 2
            interval = next(self._phases) if first else self._interval
            return interval, interval
        usual = max(params.stream_interval or 1, self._stream_interval)
        if not self._busy:
            return usual, usual
        # every stream has a step of its own in which its tokens are sent
        interval = self._many_streams_interval
        return max(usual, interval - (self._steps + hash(name)) % interval), usual


def is_plain(output: Any) -> bool:
    """Tell whether an output says nothing but tokens and their logprobs."""
    return bool(
        output.finish_reason is None
        and output.new_token_ids
        and output.events is None
        and output.prefill_stats is None
        and output.new_prompt_logprobs_tensors is None
        and output.prompt_token_id_logprobs is None
        and output.pooling_output is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.routed_experts is None
        and output.new_sampling_mask is None
        and not output.num_nans_in_logits
    )


def _is_empty(message: Any) -> bool:
    """Tell whether a message without outputs has nothing else to say either."""
    return bool(
        message.scheduler_stats is None
        and message.utility_output is None
        and message.finished_requests is None
        and message.wave_complete is None
        and message.start_wave is None
    )


def _joined(held: _Held) -> Any:
    """One output with all that was held."""
    held.output.new_logprobs = _concatenated(held.logprobs)
    return held.output


def _before(held: _Held, output: Any) -> Any:
    """An output that is sent now, with what was held before its own."""
    join(_joined(held), output)
    return output


def join(early: Any, late: Any) -> None:
    """Put a plain output's tokens and logprobs before those of a later one."""
    late.new_token_ids = early.new_token_ids + late.new_token_ids
    late.new_logprobs = _concatenated([early.new_logprobs, late.new_logprobs])


def _concatenated(parts: list[Any]) -> Any:
    """Join `LogprobsLists` at the width of the narrowest: a step is as wide as its request that asks for most."""
    present = [part for part in parts if part is not None]
    if len(present) < 2:
        return present[0] if present else None
    ids, logprobs, ranks, _ = zip(*present, strict=True)
    width = min(part.shape[1] for part in ids)
    return LogprobsLists(
        np.concatenate([part[:, :width] for part in ids]),
        np.concatenate([part[:, :width] for part in logprobs]),
        np.concatenate(ranks),
        None,
    )

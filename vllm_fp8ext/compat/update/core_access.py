# SPDX-License-Identifier: Apache-2.0
"""Access of an update to an engine core: its ranks, its step boundary, requests, caches and label.

Replaced on an instance: `add_request` while the engine is poisoned; the scheduler's `set_pause_state` while an update is
written in place or a commit waits.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.executor import UniProcExecutor
from vllm.v1.request import RequestStatus

from vllm_fp8ext.compat.features import is_available
from vllm_fp8ext.compat.update.data_parallel import EngineCores
from vllm_fp8ext.compat.update.draft_acceptance import DraftCounter
from vllm_fp8ext.compat.update.kv_cache import held_blocks
from vllm_fp8ext.compat.update.kv_epochs import KvEpochs
from vllm_fp8ext.compat.update.next_step import time_next_step
from vllm_fp8ext.compat.update.prefix_cache import EpochPrefixCache
from vllm_fp8ext.compat.update.recent_tokens import RecentTokens
from vllm_fp8ext.compat.update.refused_requests import RefusedRequests
from vllm_fp8ext.compat.update.watchdog import Watchdog
from vllm_fp8ext.config import METHOD, Settings
from vllm_fp8ext.update.contract.labels import Label, first_label
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import RankReply, RankResult

FEATURE: str = "core"
WHY: str = "Exchange weights between two steps: a plugin can't hold the scheduler."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.engine.core:EngineCore.add_request(request)",
    "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state(pause_state)",
)
USES: dict[str, tuple[str, ...]] = {
    "refuse requests while nobody knows what is served": (
        "vllm.v1.engine.core:EngineCoreProc._send_error_outputs_to_client(req_ids, client_index)",
        "vllm.v1.request:RequestStatus.FINISHED_ERROR",
    ),
    "finish the steps in flight before weights are exchanged": (
        "vllm.v1.engine.core:EngineCore.batch_queue",
        "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
    ),
    "send the outputs of the last steps of the old weights": (
        "vllm.v1.engine.core:EngineCoreProc.output_queue",
    ),
    "reach every worker": ("vllm.v1.engine.core:EngineCore.collective_rpc(method, args)",),
    "know whether the weights are asleep": ("vllm.v1.executor.abstract:Executor.sleeping_tags",),
    "label each token with the weights that sampled it": (
        "vllm.v1.engine.core:EngineCore.set_weight_version(weight_version)",
    ),
    "stop scheduling at a step boundary": ("vllm.v1.core.sched.interface:PauseState.PAUSED_ALL",),
    "tell running requests from waiting ones": ("vllm.v1.core.sched.scheduler:Scheduler.running",),
    "end running requests at a commit": (
        "vllm.v1.engine.core:EngineCoreProc._send_abort_outputs(aborted_reqs)",
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests(request_ids, finished_status)",
    ),
    "let running requests finish before a commit": ("vllm.v1.core.sched.interface:PauseState.PAUSED_NEW",),
    "count the requests that hold K and V": ("vllm.v1.core.sched.scheduler:Scheduler.kv_holding_waiting",),
    "forget what earlier weights made of images": (
        "vllm.v1.core.sched.scheduler:Scheduler.reset_encoder_cache",
    ),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/44910"
REMOVE_WHEN: str = "vLLM lets a plugin refuse requests and hold the scheduler"

logger = logging.getLogger("vllm.fp8ext")


class CoreAccess:
    """The few things that an update needs of an engine core."""

    def __init__(self, core: Any) -> None:
        self._core = core
        config = core.vllm_config
        self.settings = Settings.parse(config.additional_config)
        self.quantization = config.model_config.quantization
        self.kv_cache_dtype = config.cache_config.cache_dtype
        transfer = getattr(config, "weight_transfer_config", None)
        self.weight_transfer: str | None = transfer.backend if transfer is not None else None
        self.device_type: str = config.device_config.device_type
        self.vocabulary = config.model_config.get_vocab_size()
        self.longest_prompt = config.model_config.max_model_len
        self.watchdog = Watchdog(self.settings.deadline_seconds, core.model_executor)
        ours = self.quantization == METHOD
        self._prefix_cache = EpochPrefixCache(core, 0) if ours else None
        self._kv_epochs = KvEpochs(core) if ours else None
        if self._kv_epochs is not None and is_available("weight_versions"):
            from vllm_fp8ext.compat.update import kv_labels

            kv_labels.attach(core, self._kv_epochs)
        self.instance: str = getattr(core, "fp8ext_instance", "")
        """Random: of this life of the engine."""
        self.pids = [os.getpid()]
        self._label = first_label(self.instance)
        # vLLM wants one label of all cores
        if ours and (EngineCores.of(config).count > 1 or config.parallel_config.data_parallel_size == 1):
            self._mark(self._label)
        self._calls = itertools.count(1)
        self.compiled: list[dict[str, int]] = []
        """Counts by rank of what its process had compiled when it was last called."""
        self._add_request = core.add_request
        self._refused: RefusedRequests | None = None
        self._set_pause_state = core.scheduler.set_pause_state
        self._wishes: list[PauseState] = []
        self._recent: RecentTokens | None = getattr(core, "fp8ext_recent_tokens", None)
        self._drafts: DraftCounter | None = getattr(core, "fp8ext_draft_acceptance", None)

    def ranks(self, method: RankMethod, *args: Any) -> list[RankResult]:
        """Run a method of `Rank`, or `kv.…` of its `RankKv`, on every worker; one result each.

        A call that failed (a worker died) leaves replies unread, and a reply to another call means that every later one is
        shifted too: the process ends then.
        """
        call = next(self._calls)
        try:
            replies: list[RankReply] = self._core.collective_rpc("fp8ext", args=(call, method, *args))
        except Exception as error:
            self.watchdog.end(f"call {call} of {method} failed: {error!r}")
        counts = [reply.compiled for reply in replies]
        self.compiled = [new or old or {} for new, old in zip(counts, self.compiled or counts, strict=True)]
        answers = [(reply.call, reply.rank) for reply in replies]
        if answers != [(call, rank) for rank in range(len(replies))]:
            self.watchdog.end(f"call {call} of {method} was answered by {answers}")
        return [reply.result for reply in replies]

    def recent_tokens(self) -> list[list[int]]:
        """Tokens of the requests that ended last, the last first."""
        return self._recent.newest_first() if self._recent else []

    def draft_acceptance(self) -> dict[str, Any] | None:
        """Return counts of drafts by epoch (`DraftCounter.describe`); None without speculative decoding."""
        return self._drafts.describe() if self._drafts is not None else None

    def held_blocks(self) -> list[dict[str, Any]]:
        """List blocks of K and V that running requests hold, by group of layers."""
        return [asdict(group) for group in held_blocks(self._core)]

    def end(self, reason: str) -> NoReturn:
        """End the engine at once: it does not do what it must."""
        self.watchdog.end(reason)

    def stop(self) -> None:
        """Begin no step until `resume`; those in flight go on."""
        self._set_pause_state(PauseState.PAUSED_ALL)

    def drain(self) -> None:
        """Finish the steps in flight; their outputs leave under the version of now."""
        while self._core.batch_queue:
            self._step()

    def begin_step(self) -> None:
        """Queue the next step without waiting for it: where the engine queues steps, and its worker is in this process. From
        others nothing is heard before that step has ended."""
        core = self._core
        if core.batch_queue is None or not isinstance(core.model_executor, UniProcExecutor):
            return
        if not core.batch_queue and core.scheduler.has_requests():
            self._step()

    def _step(self) -> None:
        """As the engine's own loop does it: a step that fails ends the engine."""
        core = self._core
        try:
            outputs, executed = core.step_with_batch_queue()
        except Exception as error:
            logger.exception("fp8ext: a step failed")
            self.watchdog.end(f"a step failed: {error!r}")
        for output in (outputs or {}).items():
            core.output_queue.put_nowait(output)
        core.post_step(executed)

    def hold(self) -> None:
        """Finish what is in flight and begin nothing until `resume` or `release`: what others ask of the scheduler meanwhile
        comes after."""
        self.stop()
        self.drain()
        self._core.scheduler.set_pause_state = self._wishes.append

    def release(self) -> None:
        """Hold no more; what others have asked for meanwhile holds."""
        vars(self._core.scheduler).pop("set_pause_state", None)
        for state in self._wishes[-1:]:
            self._set_pause_state(state)
        self._wishes.clear()

    def resume(self) -> float | None:
        """Schedule again, unless others have paused meanwhile; where the KV cache sleeps, vLLM does so when it wakes."""
        if not self._wishes and not self._core.model_executor.is_sleeping:
            self._set_pause_state(PauseState.UNPAUSED)
        self.release()
        return None

    def paused(self) -> bool:
        """Tell whether somebody else has paused the engine.

        A KV cache that sleeps alone stops no update: colocated trainers wake the weights first.
        """
        paused = self._core.scheduler.pause_state != PauseState.UNPAUSED
        return bool(paused and not self._core.model_executor.is_sleeping)

    def pause_state(self) -> PauseState:
        """Return what others have asked of the scheduler."""
        return PauseState(self._core.scheduler.pause_state)

    def pause_again(self, state: PauseState) -> None:
        """Give the scheduler back the state in which others had paused it."""
        self._set_pause_state(state)

    def unpause(self) -> None:
        """Schedule again, whoever has paused the engine."""
        self._core.resume_scheduler()

    def asleep(self) -> bool:
        """Tell whether the weights have given their memory back."""
        return "weights" in self._core.model_executor.sleeping_tags

    def admit_no_more(self) -> None:
        """Go on with the requests that run; new ones wait until `resume` or `release`. When others pause the engine
        meanwhile, it is; when they resume it, it goes on as before."""
        self._set_pause_state(PauseState.PAUSED_NEW)

        def wished(state: PauseState) -> None:
            self._wishes.append(state)
            self._set_pause_state(PauseState.PAUSED_NEW if state == PauseState.UNPAUSED else state)

        self._core.scheduler.set_pause_state = wished

    def interrupted(self) -> bool:
        """Tell whether others have paused the engine since `admit_no_more`."""
        return bool(self._wishes) and self._wishes[-1] != PauseState.UNPAUSED

    def unfinished(self) -> int:
        """Requests that have begun and hold K and V."""
        scheduler = self._core.scheduler
        return len(scheduler.running) + len(scheduler.kv_holding_waiting)

    def irreplaceable(self) -> int:
        """Requests whose K and V can't be computed again: those that take their input bit by bit (vLLM's `StreamingInput`),
        whose tokens vLLM forgets with their blocks between two inputs; and those that wait for K and V from elsewhere."""
        return sum(
            request.resumable or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            for request in self._core.scheduler.requests.values()
        )

    def abort_running(self) -> None:
        """End every request that has begun, with the tokens it has and finish reason `abort`; those that wait stay."""
        scheduler = self._core.scheduler
        holding = {request.request_id for request in scheduler.kv_holding_waiting}
        begun = [
            request.request_id
            for request in scheduler.requests.values()
            if request.status == RequestStatus.RUNNING
            or request.num_output_tokens
            or request.request_id in holding
        ]
        self._core._send_abort_outputs(scheduler.finish_requests(begun, RequestStatus.FINISHED_ABORTED))

    def refuse_requests(self) -> None:
        """End every request with an error, and each one that comes, until `accept_requests`."""
        scheduler, core = self._core.scheduler, self._core

        if self._refused is None and hasattr(core, "step_fn") and not hasattr(core, "output_queue"):
            self._refused = RefusedRequests(core)

        def refuse(request: Any, *_: Any) -> None:
            if self._refused is not None:
                self._refused.add(request.request_id)
            else:
                core._send_error_outputs_to_client([request.request_id], request.client_index)

        core.add_request = refuse
        for request in scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR):
            refuse(request)

    def accept_requests(self) -> None:
        """Undo `refuse_requests`."""
        self._core.add_request = self._add_request

    def restart_prompts(self) -> tuple[int, int]:
        """Have requests without a token begin again, but those that did twice, or can't. Returns how many do, and how many
        tokens of theirs are computed again."""
        return self._kv_epochs.restart_prompts() if self._kv_epochs is not None else (0, 0)

    def enter_epoch(self, label: Label, *, recompute: bool) -> None:
        """Mark every token sampled from now on. Make cached K and V of earlier epochs unreachable, and what earlier weights
        have made of images, say."""
        if self._core.vllm_config.model_config.is_multimodal_model:
            self._core.scheduler.reset_encoder_cache()
            self._core.model_executor.reset_encoder_cache()
        if self._prefix_cache is not None:
            self._prefix_cache.advance(label.epoch, recompute=recompute)
        if self._kv_epochs is not None:
            self._kv_epochs.end(self._label)
        if self._drafts is not None:
            self._drafts.enter(label.epoch)
        self._label = label
        self._mark(label)

    def relabel(self, label: Label) -> None:
        """Mark every token sampled from now on by another version of the same weights."""
        self._label = label
        self._mark(label)

    def _mark(self, label: Label) -> None:
        """Mark tokens by the label; by its version alone where nobody decodes it, and vLLM would show it as it is."""
        self._core.set_weight_version(label.encode() if is_available("weight_versions") else label.version)

    def time_next_step(self, report: Callable[[float], None]) -> None:
        """Call `report` at the end of the next engine step (`next_step.time_next_step`), with its `time.perf_counter()`."""
        time_next_step(self._core, lambda: report(time.perf_counter()))

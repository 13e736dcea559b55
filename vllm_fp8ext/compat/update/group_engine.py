# SPDX-License-Identifier: Apache-2.0
"""The update engine of several engine cores: a thread in the process of core 0.

API server processes call core 0. Its main thread hands their calls on, and goes on with its steps. The thread runs one after
the other, and calls every core, its own as well, between two steps of each. It has a watchdog, which rests while it waits for
cores: they have their own.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm_fp8ext.compat.update.core_member import CoreMember
from vllm_fp8ext.compat.update.core_thread import CoreThread, settling
from vllm_fp8ext.compat.update.engine_changes import EngineChanges
from vllm_fp8ext.compat.update.member_channel import LocalMember, RemoteMember
from vllm_fp8ext.compat.update.watchdog import Watchdog
from vllm_fp8ext.update.contract.results import encode
from vllm_fp8ext.update.engine.core_group import CoreGroup, CoreReply, Member
from vllm_fp8ext.update.engine.engine import UpdateEngine

FEATURE: str = "core"
WHY: str = "Update several engine cores as one: each call of vLLM's reaches them one by one."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "answer a call when all cores have": ("vllm.v1.engine:EngineCoreRequestType.UTILITY",),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM exchanges weights in all data-parallel ranks or none"

logger = logging.getLogger("vllm.fp8ext")


class UnwatchedWait:
    """A member whose answers may take long, as its steps do: the watchdog of who asks rests meanwhile."""

    def __init__(self, member: Member, watchdog: Watchdog) -> None:
        self._member, self._watchdog = member, watchdog
        self.send = member.send

    def receive(self) -> CoreReply:
        """Wait for the answer."""
        with self._watchdog.resting():
            return self._member.receive()


class GroupEngine:
    """The update engine of the `count` cores of a server. `member`: makes the access to core 0, on its main thread.

    `name`: by which they are found (`data_parallel.name_of`).

    `awaits`: why nothing may be served at first, if that is so.
    """

    def __init__(
        self,
        name: str,
        count: int,
        thread: CoreThread,
        member: Callable[[], CoreMember],
        *,
        awaits: str | None,
    ) -> None:
        self._name, self._count = name, count
        self._core_thread = thread
        self._member = member
        self._awaits = awaits
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fp8ext-group", daemon=True).start()

    def call(self, operation: str, arguments: dict[str, Any]) -> "Future[dict[str, Any]]":
        """Run an operation (`engine_core.call`). Returns the future of its answer."""

        def answer() -> dict[str, Any]:
            with self._watchdog.watching(operation):
                result = self._engine.handle(operation, arguments)
            self._changes.tell()
            return encode(result, self._engine.committer.poisoned)

        run, future = settling(answer)
        self._calls.put(run)
        return future

    def wait(self, known: dict[str, Any] | None) -> "Future[dict[str, Any]]":
        """Return a future of what holds once that is not what the caller knows."""
        changed: Future[dict[str, Any]] = Future()

        def run() -> None:
            waiting = self._changes.wait(known)
            waiting.add_done_callback(lambda done: changed.set_result(done.result()))

        self._calls.put(run)
        return changed

    def _run(self) -> None:
        own = self._core_thread.submit(self._member).result()
        seconds, end = own.settings.deadline_seconds, own.end
        self._watchdog = own.watchdog.another()
        try:
            others = [RemoteMember(self._name, index, seconds, end) for index in range(1, self._count)]
            members: list[Member] = [LocalMember(self._core_thread, self._member), *others]
            group = CoreGroup(own, [UnwatchedWait(member, self._watchdog) for member in members])
            self._engine = UpdateEngine(group)
            self._changes = EngineChanges(self._engine.change)
            if self._awaits is not None:
                self._engine.committer.await_weights(self._awaits)
            logger.info("fp8ext: updates span %d engine cores", self._count)
            while True:
                self._calls.get()()
        except BaseException as error:
            logger.exception("fp8ext: the update engine failed")
            end(f"the update engine failed: {error!r}")

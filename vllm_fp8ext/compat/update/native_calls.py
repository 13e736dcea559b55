# SPDX-License-Identifier: Apache-2.0
"""Calls of vLLM's weight transfer, awaited: each is done by the update engine, on all ranks or none."""

import time
from typing import Any

from vllm_fp8ext.compat.update.engine_client import EngineCalls
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.native_handles import typed
from vllm_fp8ext.update.contract.operations import Operation
from vllm_fp8ext.update.contract.results import EngineStatus, Finishing, UpdateState

FEATURE: str = "core"
WHY: str = "Call the update engine in the order of vLLM's weight transfer."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "never: it touches nothing of vLLM's"


class NativeTransfer:
    """The transfer of one engine. What is refused raises `UpdateError`, and what is served stays.

    `broadcast_seconds`: longest time that ranks wait for a broadcast, in which a call may seem to stand still.
    `read_pickles`: handles may come pickled.
    """

    def __init__(self, engine: EngineCalls, broadcast_seconds: float, *, read_pickles: bool = False) -> None:
        self._engine = engine
        self._broadcast_seconds = broadcast_seconds
        self._read_pickles = read_pickles

    async def init(self, info: Any) -> None:
        """Join a trainer's group (`NativeUpdates.init`)."""
        await self._engine.job(Operation.NATIVE_INIT, info=info)

    async def shutdown(self) -> None:
        """Leave it."""
        await self._engine.job(Operation.NATIVE_SHUTDOWN)

    async def start(self) -> None:
        """Open an update."""
        await self._engine(Operation.NATIVE_START)

    async def update(self, info: Any) -> None:
        """Receive and stage tensors."""
        try:
            info = typed(info, read_pickles=self._read_pickles)
        except UpdateError as error:
            await self._engine(Operation.NATIVE_FAILED, reason=error.as_dict())
            raise
        started, begun = await self._engine(Operation.NATIVE_UPDATE, info=info), time.monotonic()
        while True:
            try:
                await self._engine.wait_for_job(Operation.NATIVE_UPDATE, started)
                return
            except UpdateError as error:
                # ranks give a broadcast up by themselves
                if error.kind != "engine-timeout" or time.monotonic() - begun > self._broadcast_seconds:
                    await self._engine(Operation.NATIVE_FAILED, reason=error.as_dict())
                    raise

    async def finish(self, version: Any = None) -> tuple[UpdateState, list[str]]:
        """Commit the update as `version`. Returns it, and the names of tensors that did not come."""
        finishing: Finishing = await self._engine(Operation.NATIVE_FINISHING, version=version)
        try:
            update: UpdateState = await self._engine.call_until_drained(Operation.COMMIT, id=finishing.id)
        except UpdateError as error:
            await self._engine(Operation.NATIVE_FAILED, reason=error.as_dict())
            raise
        return update, finishing.kept

    async def relabel(self, version: Any) -> None:
        """Give what is served another version."""
        await self._engine(Operation.NATIVE_RELABEL, version=version)

    async def version(self) -> str:
        """Return the version that is served."""
        status: EngineStatus = await self._engine(Operation.STATUS)
        return status.version

    async def refuse_draft(self) -> None:
        """Raise `UpdateError`: no draft model is served."""
        message = "start_draft_weight_update: a blockfp8 server has no draft model whose weights could come"
        raise UpdateError("no-draft-model", message)

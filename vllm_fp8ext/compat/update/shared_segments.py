# SPDX-License-Identifier: Apache-2.0
"""Has each process write down the segments of shared memory that it makes for vLLM."""

import logging
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
from vllm.distributed.device_communicators.shm_object_storage import SingleWriterShmRingBuffer
from vllm.distributed.device_communicators.shm_tensor_arena import ShmTensorArena

from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.shared_memory import record

FEATURE: str = "shared_segments"
WHY: str = (
    "Remove shared memory that a server left that was killed: vLLM leaves it until the machine restarts."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.distributed.device_communicators.shm_broadcast:ShmRingBuffer.__init__",
    "vllm.distributed.device_communicators.shm_object_storage:SingleWriterShmRingBuffer.__init__",
    "vllm.distributed.device_communicators.shm_tensor_arena:ShmTensorArena.__init__",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM removes what a server that was killed has left"

logger = logging.getLogger("vllm.fp8ext")


def install() -> None:
    """Idempotent."""
    for owner in (ShmRingBuffer, SingleWriterShmRingBuffer, ShmTensorArena):
        wrap(owner, "__init__", _wrap_init)


def _wrap_init(make: Any) -> Any:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if getattr(self, "is_creator", False) or getattr(self, "is_writer", False):
            try:
                record(self.shared_memory.name)
            except OSError as error:
                logger.debug("fp8ext: %s is not written down: %s", self.shared_memory.name, error)

    return made

# SPDX-License-Identifier: Apache-2.0
"""Asks the operating system for a CPU's tile registers (Intel AMX).

vLLM's attention on CPUs that have them uses them, and leaves it to others to ask: a process in which no library multiplied
by tiles before, as in a model's first step where that has few tokens, ends with an illegal instruction.
"""

import torch

FEATURE: str = "core"
WHY: str = "Ask for a CPU's tile registers: vLLM's attention uses them unasked, and the process ends."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM asks"


def allow() -> None:
    """Let this process use tile registers, where the CPU has any. Idempotent."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()

# SPDX-License-Identifier: Apache-2.0
"""Asks the operating system for a CPU's tile registers (Intel AMX).

vLLM's attention on CPUs that have them uses them, and leaves it to others to ask: a process in which no library multiplied
by tiles before, as in a model's first step where that has few tokens, ends with an illegal instruction. Can go once vLLM
asks.
"""

import torch


def allow() -> None:
    """Let this process use tile registers, where the CPU has any. Idempotent."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()

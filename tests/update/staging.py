# SPDX-License-Identifier: Apache-2.0
"""Tensors staged one at a time, each with a verdict of its own."""

from torch import Tensor

from vllm_fp8ext.update.worker.stager import Stager
from vllm_fp8ext.update.worker.staging_steps import StagingInput
from vllm_fp8ext.update.worker.verdicts import VerdictTable


def stage(
    stager: Stager, name: str, values: Tensor, first: int = 0, scales: Tensor | None = None
) -> VerdictTable:
    """Queue the staging of rows of a tensor; the table tells what became of them."""
    table = VerdictTable()
    stager.stage(StagingInput(name, values, first, scales), table)
    return table

# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints of one tiny addition model that is a mixture of experts, of a run of `examples/tiny/train.py --experts 8`:
as `vllm_fp8ext.checkpoints`, whose problems they answer, but too large for the package."""

from pathlib import Path

EARLY = Path(__file__).parent / "early"
"""Folder of the checkpoint taken in the middle of the run."""

LATE = Path(__file__).parent / "late"
"""Folder of the checkpoint at the end of the run."""

# SPDX-License-Identifier: Apache-2.0
"""A recorder refuses an interval that is none. `test_kv_engines.py` has what it records."""

import pytest

from vllm_fp8ext.compat.kv_recorder import Recorder


def test_never_is_no_interval() -> None:
    with pytest.raises(ValueError, match="every: expected at least 1, found 0"):
        Recorder({}, 0)

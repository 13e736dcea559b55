# SPDX-License-Identifier: Apache-2.0
"""Which kernels are checked. (What the checks find needs a GPU.)"""

import pytest

from vllm_fp8ext.errors import ConfigError

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.bench.correct import check


def test_a_name_that_no_check_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"begin with weight, activation, .*found 'quantise'"):
        check("quantise")

# SPDX-License-Identifier: Apache-2.0
"""A spool of ten pages, which leaves nothing in its folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_fp8ext.serve.spool import Spool

from .bodies import LIMIT


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(str(tmp_path), LIMIT)
    yield spool
    assert list(tmp_path.iterdir()) == [spool.path]
    spool.close()
    assert list(tmp_path.iterdir()) == []
    spool.close()

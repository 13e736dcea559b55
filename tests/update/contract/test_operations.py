# SPDX-License-Identifier: Apache-2.0
"""Calls of an update reach a method of the same name."""

from operator import attrgetter

import pytest

from vllm_fp8ext.update.contract.operations import Operation, RankMethod
from vllm_fp8ext.update.worker.kv_scales import RankKv
from vllm_fp8ext.update.worker.loads import Loads
from vllm_fp8ext.update.worker.rank import Rank


@pytest.mark.parametrize("method", RankMethod)
def test_every_method_of_ranks_is_there(method: RankMethod) -> None:
    owner, _, name = method.rpartition(".")
    assert callable(attrgetter(name)({"": Rank, "kv": RankKv, "loads": Loads}[owner]))


def test_what_only_reads_needs_no_weights() -> None:
    assert {each for each in Operation if each.only_reads} == {"join", "status", "manifest", "kv_scales"}
    awake = {"open", "check", "stage", "withdraw", "prepare", "commit", "rollback", "digests", "verify"}
    awake |= {"declare_current"}
    awake |= {f"native_{name}" for name in ("init", "shutdown", "start", "update", "finishing")}
    assert {each for each in Operation if each.needs_weights} == awake

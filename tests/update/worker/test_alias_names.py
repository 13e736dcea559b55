# SPDX-License-Identifier: Apache-2.0
"""Other names of tensors on a rank that does not serve all of them: a pipeline stage."""

from collections.abc import Iterable

import pytest

from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.worker.alias_names import AliasCandidate, aliases_of

SERVED = "layers.1.weight"
PIECE = ShardSlice(0, SERVED, (4,), ((0, 4),), (0,), False, "bfloat16")
STAGE = Manifest(
    {SERVED: TensorSpec(SERVED, (4,), "bfloat16")},
    frozenset({"layers.0.weight"}),
    {SERVED: (PIECE,)},
    "fp32",
    1,
)


@pytest.mark.parametrize("loader_knows", [False, True])
def test_the_verdict_on_a_served_tensor_holds_for_those_of_other_stages(loader_knows: bool) -> None:
    """Theirs come first, and can't be tried."""
    where = SERVED if loader_knows else "elsewhere"

    def trace(specs: Iterable[TensorSpec]) -> dict[str, tuple[ShardSlice, ...]]:
        piece = ShardSlice(0, where, (4,), ((0, 4),), (0,), False, "bfloat16")
        return {spec.name: (piece,) for spec in specs}

    candidates = [
        AliasCandidate(f"other.{number}.weight", f"layers.{number}.weight", sure=number == 0)
        for number in (0, 1)
    ]
    expected = {candidate.other: candidate.name for candidate in candidates} if loader_knows else {}
    assert aliases_of(candidates, STAGE, trace) == expected

# SPDX-License-Identifier: Apache-2.0
"""The exchange on a GPU: one launch that takes its turn between what is queued before and after it."""

import pytest
import torch

from vllm_fp8ext.update.worker.stopwatch import Stopwatch
from vllm_fp8ext.update.worker.weight_swap import WeightSwap

pytestmark = pytest.mark.gpu


def test_it_takes_its_turn_and_is_waited_for() -> None:
    live, shadow = (torch.full((64 << 20,), value, dtype=torch.uint8, device="cuda") for value in (1, 2))
    exchange, stopwatch = WeightSwap([(live, shadow)]), Stopwatch(live.device)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    before, after = torch.empty_like(live), torch.empty_like(live)
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    before.copy_(live)
    with stopwatch:
        exchange.run()
    assert not torch.cuda.current_stream().query(), "it was waited for"
    assert not exchange.broken
    after.copy_(live)
    seconds = stopwatch.wait()
    assert 0 < seconds < 0.05, "what came before it is not counted"
    with torch.cuda.stream(other):
        assert (live.sum() // live.numel(), shadow.sum() // shadow.numel()) == (2, 1)
    torch.cuda.synchronize()
    assert bool((before == 1).all())
    assert bool((after == 2).all())

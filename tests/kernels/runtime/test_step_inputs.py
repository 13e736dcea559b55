# SPDX-License-Identifier: Apache-2.0
"""The inputs of a step of requests with one new token each, against what they are by definition."""

import pytest
import torch

from vllm_fp8ext.kernels.runtime.step_inputs import Inputs, Requests, step_inputs

PLACES, WIDTH, PAGE = 9, 1030, 16


@pytest.mark.parametrize(
    ("count", "padded", "most", "tokens"), [(1, 1, 4, 8), (3, 4, 5, 2050), (5, 5, 5, 5), (2, 8, 1030, 40)]
)
def test_inputs_of_a_step(device: torch.device, count: int, padded: int, most: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(count)

    def numbers(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(1, high, shape, generator=generator, dtype=dtype).to(device)

    computed = torch.tensor([0, 15, 16, 17, 1, PAGE * WIDTH - 1, 500, 31, 32], dtype=torch.int32)
    pages = computed // PAGE + 1
    requests = Requests(
        computed.to(device),
        numbers(10**5, PLACES, 1, dtype=torch.int64),
        numbers(10**6, PLACES, WIDTH),
        pages.to(device),
    )
    places = torch.randperm(PLACES, generator=generator)[:count].to(device)
    before = Inputs(
        numbers(9, tokens),
        numbers(9, tokens, dtype=torch.int64),
        numbers(9, most + 1),
        numbers(9, most),
        numbers(9, most, WIDTH),
        numbers(9, tokens, dtype=torch.int64),
    )
    inputs = Inputs(*(each.clone() for each in before))
    step_inputs(places, requests, inputs, count, padded, PAGE)

    positions = requests.computed_S[places].long()
    assert torch.equal(inputs.tokens_T[:count].long(), requests.sampled_S[places, 0])
    assert torch.equal(inputs.positions_T[:count], positions)
    for actual, old in zip(inputs[:2], before[:2], strict=True):
        assert torch.equal(actual[count:], old[count:])
    assert inputs.starts_R1.tolist() == [min(at, count) for at in range(most + 1)]
    assert torch.equal(inputs.lengths_R[:count].long(), positions + 1)
    assert not inputs.lengths_R[count:].any()
    page = requests.tables_SP[places, positions // PAGE].long()
    assert torch.equal(inputs.slots_T[:count], page * PAGE + positions % PAGE)
    assert (inputs.slots_T[count:] == -1).all()
    for row, place in enumerate(places.tolist()):
        used = int(requests.pages_S[place])
        assert torch.equal(inputs.tables_RP[row, :used], requests.tables_SP[place, :used])
        assert torch.equal(inputs.tables_RP[row, used:], before.tables_RP[row, used:])
    assert not inputs.tables_RP[count:padded].any()
    assert torch.equal(inputs.tables_RP[padded:], before.tables_RP[padded:])

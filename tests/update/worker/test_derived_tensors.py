# SPDX-License-Identifier: Apache-2.0
"""Tensors that a loader computes: what comes is kept beside them, and they are computed anew in place."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_fp8ext.compat.update import mamba_decay
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.worker.derived_tensors import derived_paths
from vllm_fp8ext.update.worker.shadow import Shadow

HEADS = 4


class Mixer(nn.Module):
    """A Mamba2 layer, as far as its decay goes."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(HEADS), requires_grad=False)
        self.D = nn.Parameter(torch.ones(HEADS, dtype=torch.bfloat16), requires_grad=False)


class Model(nn.Module):
    """Loads `A_log` as vLLM's models do: under the name of what it serves."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter: Any = parameters[name.replace("A_log", "A")]
            loader = getattr(
                parameter, "weight_loader", lambda parameter, tensor: parameter.data.copy_(tensor)
            )
            loader(parameter, tensor)


@pytest.fixture(autouse=True)
def mixers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Mixer` is known as a Mamba2 layer, and there is one rank."""
    monkeypatch.setattr(mamba_decay, "MambaMixer2", Mixer)
    monkeypatch.setattr(
        "vllm.model_executor.model_loader.weight_utils.get_tensor_model_parallel_rank", lambda: 0
    )


def checkpoint(value: float) -> dict[str, Tensor]:
    logs = torch.full((HEADS,), value).bfloat16()
    return {"mixer.A_log": logs, "mixer.D": torch.full((HEADS,), value).bfloat16()}


def served(value: float) -> Model:
    model = Model()
    mamba_decay.keep_logarithms(model, shadow=False)
    model.load_weights(checkpoint(value).items())
    return model


def shadow_of(live: Model) -> Shadow:
    shadow = Model()
    mamba_decay.keep_logarithms(shadow, shadow=True)
    specs = [TensorSpec(name, tuple(tensor.shape), "bfloat16") for name, tensor in checkpoint(0.0).items()]
    return Shadow(live, shadow, specs, 0)


def test_a_loader_serves_the_decay_and_keeps_what_it_is_made_of() -> None:
    mixer: Any = served(0.5).mixer
    torch.testing.assert_close(mixer.A.data, torch.full((HEADS,), -0.5).neg().exp().neg())
    assert torch.equal(mixer.A_log, torch.full((HEADS,), 0.5))
    assert derived_paths(served(0.5)) == {"mixer.A"}


def test_a_swap_computes_the_decay_in_place() -> None:
    live = served(0.5)
    shadow, mixer = shadow_of(live), live.mixer
    assert set(shadow.manifest.pieces) == {"mixer.A_log", "mixer.D"}
    assert "mixer.A" not in shadow.addresses()
    address, before = mixer.A.data_ptr(), mixer.A.clone()
    other: Any = shadow.model.mixer
    other.A_log.fill_(1.5)
    shadow.derive()
    torch.testing.assert_close(other.A.data, -torch.full((HEADS,), 1.5).exp())
    assert torch.equal(mixer.A, before)
    shadow.swap()
    torch.testing.assert_close(mixer.A.data, -torch.full((HEADS,), 1.5).exp())
    assert mixer.A.data_ptr() == address
    shadow.swap()
    assert torch.equal(mixer.A, before)


def test_a_decay_that_nobody_keeps_is_refused() -> None:
    """Without this file the loader computes: the start is refused, by name."""
    live, shadow = Model(), Model()

    def compute(parameter: nn.Parameter, tensor: Tensor) -> None:
        parameter.data.copy_(-torch.exp(tensor.float()))

    for model in (live, shadow):
        model.mixer.A.weight_loader = compute  # type: ignore[attr-defined]
    specs = [TensorSpec("mixer.A_log", (HEADS,), "bfloat16")]
    with pytest.raises(ConfigError, match=r"mixer\.A_log: the model's loader computes on it"):
        Shadow(live, shadow, specs, 0)

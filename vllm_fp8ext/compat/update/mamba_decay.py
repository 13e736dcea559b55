# SPDX-License-Identifier: Apache-2.0
"""Lets Mamba layers keep what a checkpoint says of their decay: `A_log`, of which vLLM serves `A = -exp(A_log)` alone.

An update brings `A_log`. It is loaded into a tensor beside `A`, which is derived: computed anew in place at each swap, so
that its address stays.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader

from vllm_fp8ext.update.worker.derived_tensors import ATTRIBUTE, DerivedTensors

FEATURE: str = "core"
WHY: str = "Update the decay of Mamba layers: vLLM's loader computes it, and drops what it was computed of."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.layers.mamba.mamba_mixer:MambaMixer.A",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.A",
)
USES: dict[str, tuple[str, ...]] = {
    "load a rank's share of the heads": (
        "vllm.model_executor.model_loader.weight_utils:sharded_weight_loader(shard_axis)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM loads A_log as it is, and computes A of it after loading"


def keep_logarithms(model: nn.Module, *, shadow: bool) -> None:
    """Give each Mamba layer a tensor `A_log`, into which its loader writes. On a `shadow` it writes nothing else."""
    for module in model.modules():
        if isinstance(module, MambaMixer | MambaMixer2) and not hasattr(module, ATTRIBUTE):
            module.A_log = torch.empty_like(module.A.data)
            rebuild = partial(_rebuild, module.A.data, module.A_log)
            module.A.weight_loader = _loader(module.A_log, None if shadow else rebuild)
            setattr(module, ATTRIBUTE, DerivedTensors(frozenset({"A"}), rebuild))


def _loader(log: Tensor, then: Callable[[], None] | None) -> Callable[[Tensor, Tensor], None]:
    share = sharded_weight_loader(0)

    def load(_: Tensor, weight: Tensor) -> None:
        share(log, weight)
        if then is not None:
            then()

    return load


def _rebuild(decay: Tensor, log: Tensor) -> None:
    decay.copy_(-log.exp())

# SPDX-License-Identifier: Apache-2.0
"""How a measured server is spread over GPUs."""

import os
import re
from dataclasses import dataclass
from typing import Self

from vllm_fp8ext.errors import ConfigError

_KINDS = {"tp": "tensor", "pp": "pipeline", "dp": "data", "replicas": "replicas"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a spread: servers (`replicas`), their data-parallel cores, stages, and ranks of a stage."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    replicas: int = 1

    @classmethod
    def of(cls, text: str) -> Self:
        """Read `one`, or parts that are joined by `+`: `tp2`, `dp2`, `replicas2`.

        Raises:
            ConfigError: it is none of these.
        """
        parts = [] if text == "one" else text.split("+")
        matches = [re.fullmatch(r"(tp|pp|dp|replicas)([1-9]\d*)", part) for part in parts]
        sizes = {_KINDS[match[1]]: int(match[2]) for match in matches if match}
        if len(sizes) < len(parts):
            raise ConfigError(f"expected one, or such as tp2, pp2, dp2, replicas2 or tp2+dp2, found {text!r}")
        return cls(**sizes)

    def __str__(self) -> str:
        parts = [f"{kind}{getattr(self, name)}" for kind, name in _KINDS.items() if getattr(self, name) > 1]
        return "+".join(parts) or "one"

    def facts(self) -> dict[str, str]:
        """Return what a case says of it: nothing of one GPU."""
        return {} if self == Layout() else {"layout": str(self)}

    @property
    def ranks(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline * self.data

    def arguments(self) -> list[str]:
        """Return arguments of `vllm serve` for each replica."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        options = [(f"--{name}-parallel-size", str(size)) for name, size in sizes.items() if size > 1]
        backend = ["--distributed-executor-backend", "mp"] if self.tensor * self.pipeline > 1 else []
        return [*(word for option in options for word in option), *backend]

    def variables(self, replica: int) -> dict[str, str]:
        """Return the environment of a replica: the GPUs of its own, the first ones for the first.

        Raises:
            ConfigError: there are GPUs, but not as many.
        """
        gpus = visible_gpus()
        own = gpus[replica * self.ranks : (replica + 1) * self.ranks]
        if gpus and len(own) < self.ranks:
            raise ConfigError(f"layout {self}: expected {self.ranks * self.replicas} GPUs, found {len(gpus)}")
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)} if gpus else {}


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, as the variable for them names them."""
    import torch

    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return told.split(",") if told else [str(number) for number in range(torch.cuda.device_count())]

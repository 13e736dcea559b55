# SPDX-License-Identifier: Apache-2.0
"""Stands in for vLLM's weight transfer engines where a blockfp8 model is served.

Adds `fp8ext_nccl` and `fp8ext_ipc` to vLLM's factory. A blockfp8 model that is configured with `nccl` or `ipc` gets these.
Its updates are the update engine's (`update.engine.native`); what workers would do by themselves is refused.
"""

from typing import Any, NoReturn

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from vllm_fp8ext.errors import ForeignLoadError
from vllm_fp8ext.update.engine.native import IPC, NCCL

FEATURE: str = "weight_transfer"
WHY: str = "Serve vLLM's weight transfer by the update engine: vLLM's own engines write into served codes."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "take the place of vLLM's weight transfer engines": (
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine(name, module_path_or_cls)",
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory._registry",
        "vllm.distributed.weight_transfer.base:WeightTransferEngine.receive_weights(update_info)",
        "vllm.config.weight_transfer:WeightTransferConfig.backend",
        "vllm.config:VllmConfig.weight_transfer_config",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's weight transfer leaves it to an engine when weights are served"

STANDS_FOR = {"nccl": NCCL, "ipc": IPC}
"""This plugin's engine, by the one of vLLM's that a user configures."""
_NAMES = {ours: name for name, ours in STANDS_FOR.items()}


def install() -> None:
    """Make the engines known to vLLM. Idempotent."""
    for name in STANDS_FOR.values():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, UpdateEngineTransfer)


def configure(config: WeightTransferConfig | None) -> None:
    """Give a blockfp8 model this plugin's engine in place of vLLM's."""
    if config is not None:
        config.backend = STANDS_FOR.get(config.backend, config.backend)


def unsupported(config: WeightTransferConfig | None) -> str | None:
    """Return why a configured engine can't serve a blockfp8 model."""
    if config is None or config.backend in STANDS_FOR or config.backend in _NAMES:
        return None
    return f"--weight-transfer-config: expected backend nccl or ipc, found {config.backend}"


def configured_name(backend: str) -> str:
    """Return the name that the user wrote for an engine."""
    return _NAMES.get(backend, backend)


class UpdateEngineTransfer(WeightTransferEngine[Any, Any]):
    """Stands in a worker for the update engine, which receives weights by itself."""

    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Any) -> NoReturn:
        """Refuse: the calls of `AsyncLLM` and `LLM` reach the update engine, a worker's own do not."""
        raise ForeignLoadError("init_weight_transfer_engine")

    def start_weight_update(self) -> NoReturn:
        """Refuse, as all others do."""
        raise ForeignLoadError("start_weight_update")

    def receive_weights(self, update_info: Any) -> NoReturn:
        """Refuse, as all others do."""
        raise ForeignLoadError("update_weights")

    def finish_weight_update(self) -> NoReturn:
        """Refuse, as all others do."""
        raise ForeignLoadError("finish_weight_update")

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""

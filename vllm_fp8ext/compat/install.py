# SPDX-License-Identifier: Apache-2.0
"""Registers `blockfp8` with vLLM and adds our methods to its engine core and workers.

The registered class is a stand-in: the real configuration, and with it the layers it builds on, is imported when vLLM asks
for it, so that a server without blockfp8 pays nothing and can't be broken by it.
"""

import logging
from functools import cache
from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_fp8ext.compat import unsupported_options
from vllm_fp8ext.compat.features import require_core
from vllm_fp8ext.compat.update import engine_core, owner_process, worker
from vllm_fp8ext.config import METHOD, MIN_CAPABILITY

FEATURE: str = "core"
WHY: str = "Make --quantization accept blockfp8: vLLM has a registry for that."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "make --quantization accept blockfp8": (
        "vllm.model_executor.layers.quantization:register_quantization_config(quantization)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "never: this is vLLM's own hook"

logger = logging.getLogger("vllm.fp8ext")

_installed = False


def install() -> None:
    """Idempotent."""
    global _installed
    if _installed:
        return
    register_quantization_config(METHOD)(BlockFp8)
    worker.install()
    engine_core.install()
    unsupported_options.install()
    _install_weight_transfer()
    owner_process.install()
    _record_segments()
    _installed = True


def _install_weight_transfer() -> None:
    """Lead vLLM's weight transfer to the update engine; where vLLM lacks a name the feature is off."""
    try:
        from vllm_fp8ext.compat.update import native_engines, native_methods

        native_engines.install()
        native_methods.install()
    except (ImportError, AttributeError) as error:
        logger.debug("fp8ext: vLLM's weight transfer is not served: %s", error)


def _record_segments() -> None:
    """Have segments of shared memory written down, by every server; to look for names first would cost each of them."""
    try:
        from vllm_fp8ext.compat.update import shared_segments
    except ImportError as error:
        logger.debug("fp8ext: segments of shared memory are not written down: %s", error)
        return
    shared_segments.install()


class BlockFp8(QuantizationConfig):
    """Stand-in for `vllm_fp8ext.layers.quantization.BlockFp8Config`; making one makes the real one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _real()(*args, **kwargs)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return _real().from_config(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        if user_quant != METHOD:
            return None
        overridden = _real().override_quantization_method(hf_quant_cfg, user_quant, hf_config)
        assert overridden is None or isinstance(overridden, str)
        return overridden

    def get_name(self) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[Any]:
        supported: list[Any] = _real().get_supported_act_dtypes()
        return supported

    @classmethod
    def get_min_capability(cls) -> int:
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        raise NotImplementedError  # never reached: instances are of the real class


@cache
def _real() -> Any:
    """Looked for once in a process: to read that much of vLLM takes a second."""
    require_core()
    from vllm_fp8ext.layers.quantization import BlockFp8Config

    return BlockFp8Config

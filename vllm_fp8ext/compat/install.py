# SPDX-License-Identifier: Apache-2.0
"""Registers `blockfp8` with vLLM and adds our methods to its engine core and workers.

The registered class is a stand-in: the real configuration, and with it the layers it builds on, is imported when vLLM asks
for it, so that a server without blockfp8 pays nothing and can't be broken by it.
"""

from functools import cache
from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_fp8ext.compat import unsupported_options as refusals
from vllm_fp8ext.compat.interfaces import INTERFACES
from vllm_fp8ext.compat.probe import find_missing
from vllm_fp8ext.compat.update import engine_core, worker
from vllm_fp8ext.compat.update import owner_process as owner
from vllm_fp8ext.compat.update import shared_segments as segments
from vllm_fp8ext.config import METHOD, MIN_CAPABILITY
from vllm_fp8ext.errors import UnsupportedVllmError

_installed = False


def install() -> None:
    """Idempotent."""
    global _installed
    if _installed:
        return
    register_quantization_config(METHOD)(BlockFp8)
    worker.install()
    engine_core.install()
    refusals.install()
    segments.install()
    owner.install()
    _installed = True


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
    missing = find_missing(INTERFACES)
    if missing:
        raise UnsupportedVllmError(
            "--quantization blockfp8 needs interfaces that this vLLM lacks:\n  " + "\n  ".join(missing)
        )
    from vllm_fp8ext.layers.quantization import BlockFp8Config

    return BlockFp8Config

# SPDX-License-Identifier: Apache-2.0
"""Memory of GPUs, and what vLLM chooses by it."""

from dataclasses import dataclass

from vllm_fp8ext.config import GIB
from vllm_fp8ext.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    total: int
    """Bytes that CUDA says it has (`cudaMemGetInfo`), of which vLLM takes its share: about half a GiB less than `nvidia-smi`
    shows."""

    @property
    def max_num_batched_tokens(self) -> int:
        """`vllm serve`'s default (`EngineArgs.get_batch_defaults`)."""
        if self.total >= 160 * GIB:
            return 16384
        return 8192 if self._large else 2048

    @property
    def max_num_seqs(self) -> int:
        """`vllm serve`'s default (`EngineArgs.get_batch_defaults`)."""
        return 1024 if self._large else 256

    @property
    def serves_blockfp8(self) -> bool:
        """Return whether it has FP8 matrix units, as far as the name tells."""
        return not self._is_a100

    @property
    def _large(self) -> bool:
        return self.total >= 70 * GIB and not self._is_a100

    @property
    def _is_a100(self) -> bool:
        return self.name.startswith("A100")


GPUS = {
    name: Gpu(name=name, total=int(gib * GIB))
    for name, gib in {
        "A100-40GB": 39.39,
        "A100-80GB": 79.15,
        "H100": 79.11,
        "H200": 139.80,
        "B200": 178.35,
    }.items()
}
"""Total bytes by name, as torch's out-of-memory errors tell them. It differs by some tens of MiB between drivers."""


def gpu(name: str | None, memory_gib: float | None) -> Gpu:
    """Parse a GPU's name, an amount of memory, or a name with another amount.

    Raises:
        ConfigError: unknown name, or neither was given.
    """
    known = {key.lower(): value for key, value in GPUS.items()}.get((name or "").lower())
    if name and not known:
        raise ConfigError(f"unknown GPU {name!r}: give --memory-gib, or one of {', '.join(GPUS)}")
    if memory_gib is not None:
        return Gpu(name=known.name if known else f"{memory_gib:g} GiB", total=int(memory_gib * GIB))
    if known is None:
        raise ConfigError("which GPU? Give --gpu, --memory-gib or --kv-cache-memory-bytes")
    return known

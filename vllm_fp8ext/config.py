# SPDX-License-Identifier: Apache-2.0
"""The settings of a server: `--additional-config '{"fp8ext": {…}}'`, validated."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_fp8ext.errors import ConfigError

SECTION = "fp8ext"
"""Key of our settings in vLLM's `--additional-config`."""

GIB = 1 << 30


class Settings(BaseModel):
    """What a user can choose. Every field has a default; an unknown key or a wrong value is an error at start."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    scale_format: Literal["fp32", "pow2"] = "fp32"
    """Format of block scales: `amax / 448`, or the smallest power of two that is not below it."""

    ignore: tuple[str, ...] = Field(default=(), strict=False)
    """Layers kept in the checkpoint's precision: names or shell patterns of modules (`*.o_proj`, `model.layers.0.*`)."""

    staging: Literal["shadow", "none"] = "shadow"
    """`shadow` keeps a second copy of the served weights, which makes live updates and rollback possible. `none` saves its
    memory and refuses updates."""

    kv_scales: Literal["static"] | None = None
    """Required with an FP8 KV cache. `static`: the checkpoint's scales, or 1.0 where it has none."""

    allowed_dirs: tuple[str, ...] = Field(default=(), strict=False)
    """Folders from which `…/files` and `/load` may read checkpoints. None by default."""

    spool_dir: str = "/dev/shm"
    """Where uploaded chunks wait until every rank has staged them."""

    spool_bytes: int = Field(default=4 * GIB, ge=1 << 20)
    """Largest total size of waiting chunks, and so of one chunk. An upload beyond it waits."""

    deadline_seconds: float = Field(default=600.0, gt=0)
    """Longest time that one call may wait for the engine."""

    @classmethod
    def parse(cls, additional_config: Mapping[str, Any] | None) -> "Settings":
        """Settings in vLLM's additional configuration.

        Raises:
            ConfigError: naming every unknown key and wrong value, with what is valid.
        """
        section = (additional_config or {}).get(SECTION, {})
        if not isinstance(section, Mapping):
            raise ConfigError(f'--additional-config "{SECTION}": expected an object, found {section!r}')
        try:
            return cls.model_validate(dict(section))
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"  {name}: unknown key; the keys are {', '.join(sorted(Settings.model_fields))}")
        else:
            lines.append(f"  {name}: {problem['msg']}, found {problem['input']!r}")
    return f'--additional-config "{SECTION}" is not valid:\n' + "\n".join(lines)

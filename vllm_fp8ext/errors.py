# SPDX-License-Identifier: Apache-2.0
"""The errors that this package raises for what a user can change; wrong arguments are a `ValueError`, as elsewhere.

Fp8ExtError
├── ConfigError           a setting, or a combination with one of vLLM's, that can't be served
├── ForeignLoadError      somebody else's loader was called on a served model; nothing was written
├── UnsupportedVllmError  the installed vLLM lacks an interface that is needed
└── UpdateError           an update was refused; the served weights are as they were
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

__all__ = [
    "WITHOUT_UPDATES",
    "ConfigError",
    "ForeignLoadError",
    "Fp8ExtError",
    "UnsupportedVllmError",
    "UpdateError",
    "described",
    "no_live_updates",
]


class Fp8ExtError(Exception):
    """Base of all errors of this package."""


class ConfigError(Fp8ExtError, ValueError):
    """A setting that is not valid, or not possible together with vLLM's own settings."""


class UnsupportedVllmError(Fp8ExtError, RuntimeError):
    """The installed vLLM lacks interfaces that blockfp8 builds on."""


class ForeignLoadError(Fp8ExtError, RuntimeError):
    """Weights were to be loaded into a served model by something else than an update. Nothing was written."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            f"blockfp8: {what} would write into the codes and scales of a served model, and was refused. New weights come by "
            "an update: Client.push or fp8ext push over HTTP, or embedded(engine) in the engine's own process: docs/client.md"
        )

    def __reduce__(self) -> tuple[type["ForeignLoadError"], tuple[str]]:
        """Workers raise it in another process."""
        return ForeignLoadError, (self.what,)


class UpdateError(Fp8ExtError):
    """An update, or a step of one, was refused. Nothing that is served has changed.

    `kind` is the last part of the problem type at the HTTP edge (`incomplete`, `unknown-tensor`, …), `status` the HTTP
    status, `details` what a program may want to read.
    """

    def __init__(self, kind: str, message: str, *, status: int = 409, **details: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.details = details

    def __reduce__(self) -> tuple[Callable[..., "UpdateError"], tuple[dict[str, Any]]]:
        """Workers of pools and actors raise it in another process."""
        return UpdateError.from_dict, (self.as_dict(),)

    def as_dict(self) -> dict[str, Any]:
        """Plain form that crosses process boundaries."""
        return {"kind": self.kind, "message": str(self), "status": self.status, "details": self.details}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "UpdateError":
        """The error that `as_dict` described."""
        return cls(data["kind"], data["message"], status=data["status"], **data["details"])


WITHOUT_UPDATES = '--additional-config \'{"fp8ext": {"staging": "none"}}\''
"""What serves a model of which an update could not bring everything."""


def no_live_updates(problems: Iterable[str]) -> ConfigError:
    """Make the error of a model whose weights can't be updated live, a line for each problem."""
    lines = ["this model's weights can't be updated live:", *problems]
    return ConfigError("\n  ".join(lines) + f"\n{WITHOUT_UPDATES} serves it without updates")


def described(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Turn exceptions into results, `{"error": …}`, where raising would do harm.

    An exception on one rank leaves the other ranks' replies unread, and every later answer is another call's.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return method(*args, **kwargs)
        except UpdateError as error:
            return {"error": error.as_dict()}
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if _out_of_memory(error):
                return {"error": UpdateError("out-of-memory", message, status=507).as_dict()}
            return {"error": UpdateError("internal", message, status=500).as_dict()}

    return call


def _out_of_memory(error: Exception) -> bool:
    """Of the host, of a GPU (`torch.OutOfMemoryError`), or of torch's CPU allocator, which has no type of its own."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )

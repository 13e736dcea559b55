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
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "WITHOUT_UPDATES",
    "ConfigError",
    "Failure",
    "ForeignLoadError",
    "Fp8ExtError",
    "UnsupportedVllmError",
    "UpdateError",
    "errors_as_results",
    "no_live_updates",
]


P = ParamSpec("P")
T = TypeVar("T")


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
            "an update: Client.push or fp8ext push over HTTP, embedded(engine) in the engine's own process (docs/client.md), "
            "or load_weights of the whole model in its workers (docs/trainers.md)"
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
"""Options that serve a model of which an update could not bring everything."""


def no_live_updates(problems: Iterable[str]) -> ConfigError:
    """Make the error of a model without live updates, a line for each problem."""
    lines = ["this model's weights can't be updated live:", *problems]
    return ConfigError("\n  ".join(lines) + f"\n{WITHOUT_UPDATES} serves it without updates")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An `UpdateError` as a result, where raising would do harm.

    `unchanged`: the rank that failed holds what it held before the call.
    """

    kind: str
    message: str
    status: int = 409
    details: dict[str, Any] = field(default_factory=dict)
    unchanged: bool = False

    @classmethod
    def of(cls, error: UpdateError, *, unchanged: bool = False) -> "Failure":
        return cls(**error.as_dict(), unchanged=unchanged)

    @property
    def error(self) -> UpdateError:
        return UpdateError(self.kind, self.message, status=self.status, **self.details)


def errors_as_results(method: Callable[P, T]) -> Callable[P, T | Failure]:
    """Turn exceptions into a `Failure`, where raising would do harm.

    An exception on one rank leaves the other ranks' replies unread, and every later answer is another call's.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T | Failure:
        try:
            return method(*args, **kwargs)
        except UpdateError as error:
            return Failure.of(error)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if _out_of_memory(error):
                return Failure.of(UpdateError("out-of-memory", message, status=507))
            return Failure.of(UpdateError("internal", message, status=500))

    return call


def _out_of_memory(error: Exception) -> bool:
    """Tell whether memory ran out: the host's, a GPU's (`torch.OutOfMemoryError`), or that of torch's CPU allocator.

    The last raises an error without a type of its own.
    """
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )

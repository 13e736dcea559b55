# SPDX-License-Identifier: Apache-2.0
"""Which methods of a worker a trainer may call."""

from functools import partial

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.native.worker_extension import require_method


class Base:
    """A base of an extension."""

    def inherited(self) -> None: ...
    def shadowed(self) -> None: ...


class Extension(Base):
    """Its methods join those of vLLM's worker."""

    shadowed = None  # type: ignore[assignment]  # an extension can do so
    bound = partial(print)
    loader = Base
    device = 0

    def load(self) -> None: ...
    def _private(self) -> None: ...
    @classmethod
    def of_class(cls) -> None: ...
    @staticmethod
    def of_nothing() -> None: ...
    @property
    def size(self) -> int:
        return 0


NAME = f"{__name__}.Extension"


@pytest.mark.parametrize("method", ["load", "inherited", "of_class", "of_nothing"])
def test_methods_that_the_extension_defines(method: str) -> None:
    require_method(NAME, method)


@pytest.mark.parametrize(
    "method",
    [
        "fp8ext",
        "load_model",
        "shutdown",
        "_private",
        "__init__",
        "__reduce__",
        "mro",
        "size",
        "device",
        "bound",
        "loader",
        "shadowed",
    ],
)
def test_no_others(method: str) -> None:
    with pytest.raises(
        UpdateError, match=rf"a public method of the worker extension {NAME}, found '{method}'"
    ) as caught:
        require_method(NAME, method)
    assert (caught.value.kind, caught.value.status) == ("invalid-request", 422)

# SPDX-License-Identifier: Apache-2.0
"""Methods that are wrapped: once, in a stated order, and as they were when a context is left."""

import contextlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.compat import wrapping
from vllm_fp8ext.compat.interfaces import headers
from vllm_fp8ext.compat.wrapping import ORDER, wrap, wrap_instance, wrapped


class Owner:
    """An owner of functions to wrap."""

    def call(self) -> str:
        return "vLLM's"

    @classmethod
    def make(cls, name: str) -> str:
        return f"{cls.__name__} {name}"


def around(module: str, text: str = "ours") -> Any:
    """A wrapper of a file."""

    def wrapper(original: Any) -> Any:
        return lambda *args: f"{text} around {original(*args)}"

    wrapper.__module__, wrapper.__qualname__ = module, f"_wrap_{text}"
    return wrapper


@pytest.fixture
def owner() -> Any:
    """A class of its own for each test."""
    return type("Owned", (Owner,), {"call": Owner.call, "make": vars(Owner)["make"]})


def test_a_method_is_wrapped_once(owner: Any) -> None:
    for _ in range(2):
        wrap(owner, "call", around("a.b"))
    wrap(owner, "call", around("a.c", "another"))
    wrap(owner, "call", around("a.b"))
    assert owner().call() == "another around ours around vLLM's"
    assert owner.call.fp8ext_wrappers == {"a.b._wrap_ours", "a.c._wrap_another"}
    assert owner.call.__name__ == "call"


def test_a_class_method_stays_one_and_is_wrapped_once(owner: Any) -> None:
    for _ in range(2):
        wrap(owner, "make", around("a.b"))
    assert owner.make("x") == "ours around Owned x"
    assert type("Below", (owner,), {}).make("x") == "ours around Below x"


def test_an_instance_alone_is_wrapped(owner: Any) -> None:
    one, other = owner(), owner()
    wrap_instance(one, "call", around("a.b"))
    assert one.call() == "ours around vLLM's"
    assert other.call() == "vLLM's"


def test_a_context_leaves_a_method_as_it_was(owner: Any) -> None:
    before = owner.call
    with contextlib.suppress(ZeroDivisionError), wrapped(owner, "call", around("a.b")):
        assert owner().call() == "ours around vLLM's"
        raise ZeroDivisionError
    assert owner.call is before


def test_what_comes_later_stays_outside(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wrapping.ORDER, "call", ("inner", "outer"))
    wrap(owner, "call", around("x.inner", "inner"))
    wrap_instance(one := owner(), "call", around("x.outer", "outer"))
    assert one.call() == "outer around inner around vLLM's"
    with pytest.raises(
        RuntimeError, match=r"call: expected x.inner inside x.outer._wrap_outer, found it after"
    ):
        wrap_instance(one, "call", around("x.inner", "again"))


@pytest.mark.parametrize("name", ORDER)
def test_each_order_is_held(name: str) -> None:
    """As files install themselves: the last first is an error."""
    owner = type("Owned", (), {name: lambda self: "vLLM's"})
    *inner, last = ORDER[name]
    wrap(owner, name, around(f"x.{last}"))
    for file in inner:
        with pytest.raises(RuntimeError, match="found it after"):
            wrap(owner, name, around(f"x.{file}"))


def test_every_method_that_two_files_wrap_has_an_order() -> None:
    files: dict[str, set[str]] = defaultdict(set)
    for header in headers():
        for interface in header.replaces:
            method = interface.name.rpartition(".")[2]
            owner = "AttentionImpl" if method == "forward" and "Impl" in interface.name else interface.name
            files[f"{interface.module if method != 'forward' else ''}:{owner}"].add(Path(header.file).stem)
    shared = {
        key.rpartition(".")[2].rpartition(":")[2]: names for key, names in files.items() if len(names) > 1
    }
    shared["forward"] = shared.pop("AttentionImpl")
    assert shared.pop("output_queue", None) is None
    assert {name: set(order) for name, order in ORDER.items()} == shared

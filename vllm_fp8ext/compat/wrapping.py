# SPDX-License-Identifier: Apache-2.0
"""Puts functions of ours around one of vLLM's, each once and in a stated order."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

_WRAPPERS = "fp8ext_wrappers"
"""Attribute of a function of ours: the names of all that are around vLLM's."""

ORDER: dict[str, tuple[str, ...]] = {
    # a step that is reused has the metadata that was made for it, whatever graph it was made for
    "prepare_attn": ("mixed_full_cudagraph", "decode_step_reuse"),
    # the launch is tried on buffers that no graph of the sampler holds yet
    "capture_model": ("decode_step_reuse", "sampling_cudagraph"),
    # a checkpoint is recorded as it is loaded; what is recorded of a checkpoint is recorded of a tensor that comes twice, too
    "get_all_weights": ("mxfp4_checkpoints", "model", "repeated_tensors"),
    # what a request held is forgotten before it is hashed again
    "get_computed_blocks": ("prefix_cache", "kv_epochs"),
    # messages are merged as they are once they are unpacked
    "get_output_async": ("packed_logprobs", "merged_messages"),
    # our attention does not call what it replaces where requests decode: the recorder would see prompts alone
    "forward": ("layer_attention", "kv_recorder"),
    # a core that refuses requests has the others step together all the same
    "add_request": ("core_access", "core_member"),
    # one of both holds the scheduler at a time: where several cores are updated as one, the member
    "set_pause_state": ("core_access", "core_member"),
}
"""Files that wrap the same method, the innermost first."""

Wrapper = Callable[[Any], Any]
"""A function that makes a method of ours of one of vLLM's."""


def wrap(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Replace a method of a class, or a function of a module, once.

    A wrapper of a class method gets its function, whose first parameter is the class.

    Raises:
        RuntimeError: a file is around it that comes after the wrapper's in `ORDER`.
    """
    inner = getattr(owner, name)
    if f"{wrapper.__module__}.{wrapper.__qualname__}" in getattr(inner, _WRAPPERS, ()):
        return
    is_class_method = isinstance(vars(owner).get(name), classmethod)
    wrapped = _around(inner.__func__ if is_class_method else inner, name, wrapper)
    setattr(owner, name, classmethod(wrapped) if is_class_method else wrapped)


def wrap_instance(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Replace a method of one instance, as often as this is called.

    Raises:
        RuntimeError: as `wrap`.
    """
    setattr(owner, name, _around(getattr(owner, name), name, wrapper))


@contextlib.contextmanager
def wrapped(owner: Any, name: str, wrapper: Wrapper) -> Iterator[None]:
    """Replace a method of a class while the context is entered.

    Raises:
        RuntimeError: as `wrap`.
    """
    original = getattr(owner, name)
    setattr(owner, name, _around(original, name, wrapper))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _around(inner: Any, name: str, wrapper: Wrapper) -> Any:
    around: frozenset[str] = getattr(inner, _WRAPPERS, frozenset())
    order, file = ORDER.get(name, ()), _file(wrapper.__module__)
    later = order[order.index(file) + 1 :] if file in order else ()
    wrong = sorted(one for one in around if _file(one.rpartition(".")[0]) in later)
    if wrong:
        raise RuntimeError(f"{name}: expected {wrapper.__module__} inside {', '.join(wrong)}, found it after")
    made = functools.wraps(inner)(wrapper(inner))
    setattr(made, _WRAPPERS, around | {f"{wrapper.__module__}.{wrapper.__qualname__}"})
    return made


def _file(module: str) -> str:
    """The name of a module's file."""
    return module.rpartition(".")[2]

# SPDX-License-Identifier: Apache-2.0
"""Wrap all that is wrapped on classes and modules of vLLM, and print each call of vLLM's own that no wrapper takes.

Prints JSON: the methods that were wrapped by name, and one line for each call in vLLM's sources that vLLM's method takes and
ours does not.
"""

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.entrypoints.cli import serve

from vllm_fp8ext.compat import unsupported_options
from vllm_fp8ext.compat.graphs import fusion_attention
from vllm_fp8ext.compat.interfaces import Interface, headers
from vllm_fp8ext.compat.speed import (
    decode_prefill_split,
    decode_step_reuse,
    flat_answers,
    flat_logprobs,
    json_responses,
    latency_histogram,
    merged_messages,
    mixed_full_cudagraph,
    output_interval,
    packed_logprobs,
    piecewise_capture_sizes,
    sampling_cudagraph,
    token_logprobs,
)
from vllm_fp8ext.compat.update import (
    api_processes,
    basic_auth,
    beam_versions,
    cpu_conv,
    cpu_kv_rounding,
    encoder_layers,
    ended_calls,
    engine_core,
    latent_cache,
    latent_weights,
    native_methods,
    owner_process,
    shared_segments,
    weight_versions,
    worker,
)
from vllm_fp8ext.compat.wrapping import wrap

LONGEST_CALL = 4000
"""Characters of a call in vLLM's sources."""


def install_all() -> None:
    """Wrap in the order in which servers do."""
    for module in (
        *(worker, engine_core, unsupported_options, owner_process, shared_segments, encoder_layers),
        *(output_interval, packed_logprobs, merged_messages, flat_logprobs, flat_answers, weight_versions),
        *(decode_prefill_split, piecewise_capture_sizes, mixed_full_cudagraph, token_logprobs),
        *(decode_step_reuse, sampling_cudagraph, native_methods, cpu_conv, cpu_kv_rounding),
        *(latent_weights, latent_cache, json_responses, latency_histogram, ended_calls),
    ):
        module.install()
    beam_versions.install_offline()
    basic_auth.install(lambda header: None)
    # `install` would have this process remove what servers left
    wrap(serve, "wait_for_completion_or_failure", api_processes._wrap_wait_for_completion_or_failure)
    fusion_attention.configure(SimpleNamespace(additional_config={}), "fp32")


def wrapped_methods() -> Iterator[tuple[Interface, Any, Any]]:
    """Yield each method of vLLM that has wrappers: its name, what is called, and vLLM's own."""
    seen = set()
    for header in headers():
        for interface in header.replaces:
            value: Any = importlib.import_module(interface.module)
            for part in interface.name.split("."):
                value = getattr(value, part, None)
            function = getattr(value, "__func__", value)
            if not hasattr(function, "fp8ext_wrappers") or (interface.module, interface.name) in seen:
                continue
            seen.add((interface.module, interface.name))
            yield interface, function, inspect.unwrap(function)


def calls(names: set[str]) -> dict[str, set[tuple[int, tuple[str, ...]]]]:
    """Find how vLLM calls methods of these names: numbers of positional arguments, and names of others."""
    forms: dict[str, set[tuple[int, tuple[str, ...]]]] = {name: set() for name in names}
    called = re.compile(rf"(?<!def )(?<!class )\b({'|'.join(sorted(names))})\(")
    for file in Path(str(vllm.__file__)).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for found in called.finditer(text):
            node = call_at(text, found.start())
            if node is None or any(isinstance(one, ast.Starred) for one in node.args):
                continue
            if all(keyword.arg for keyword in node.keywords):
                forms[found[1]].add((len(node.args), tuple(str(keyword.arg) for keyword in node.keywords)))
    return forms


def call_at(text: str, start: int) -> ast.Call | None:
    """Return the call that begins there, or None where it is prose. To parse whole files instead takes ten seconds."""
    end = start
    while 0 < (end := text.find(")", end) + 1) < start + LONGEST_CALL:
        try:
            call = ast.parse(text[start:end], mode="eval").body
        except (SyntaxError, ValueError):
            continue
        return call if isinstance(call, ast.Call) else None
    return None


def takes(signature: inspect.Signature, count: int, names: tuple[str, ...]) -> bool:
    """Tell whether a call of that form fits."""
    try:
        signature.bind(*range(count), **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def main() -> None:
    """Print what is wrapped, and what is not taken."""
    install_all()
    methods = list(wrapped_methods())
    short = {interface.name.rpartition(".")[2] for interface, _, _ in methods}
    constructors = {
        interface.name.split(".")[-2] for interface, _, _ in methods if "__init__" in interface.name
    }
    forms = calls((short - {"__init__", "__call__"}) | constructors)
    refused = []
    for interface, ours, theirs in methods:
        *_, name = interface.name.split(".")
        called = interface.name.split(".")[-2] if name == "__init__" else name
        own, original = (inspect.signature(function, follow_wrapped=False) for function in (ours, theirs))
        is_method = "." in interface.name
        for count, names in forms.get(called, ()):
            # a call by the class has the instance, or the class, among its arguments
            for positional in {count + is_method, count}:
                if takes(original, positional, names) and not takes(own, positional, names):
                    refused.append(
                        f"{interface.name}: {positional} arguments and {', '.join(names) or 'no names'}"
                    )
    json.dump({"wrapped": sorted(one.name for one, _, _ in methods), "refused": refused}, sys.stdout)


if __name__ == "__main__":
    main()

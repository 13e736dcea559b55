# SPDX-License-Identifier: Apache-2.0
"""Tells which methods of a worker a trainer may call: those that the server's worker extension defines."""

import inspect
import pkgutil

from vllm_fp8ext.errors import UpdateError


def require_method(extension: str, method: str) -> None:
    """Require that a worker extension, or a base of it, defines a public method.

    What `object` defines is not called. Workers have vLLM's methods beside those of the extension: they load weights, and run
    functions of any name. The class, `module.Class` as `--worker-extension-cls` names it, is imported: that can take seconds.

    Raises:
        UpdateError: `invalid-request`.
    """
    for base in pkgutil.resolve_name(extension).__mro__:
        if base is not object and method in vars(base):
            if not method.startswith("_") and inspect.isroutine(vars(base)[method]):
                return
            break
    message = f"method: expected a public method of the worker extension {extension}, found {method!r:.100}"
    raise UpdateError("invalid-request", message, status=422)

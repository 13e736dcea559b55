# SPDX-License-Identifier: Apache-2.0
"""Blockwise-FP8 rollouts for vLLM, with live, atomic weight updates over HTTP.

Importing this package does nothing: vLLM calls `vllm_fp8ext.register.register` through its plugin entry point.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-fp8ext")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]

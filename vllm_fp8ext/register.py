# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in each of its processes."""

import logging

logger = logging.getLogger("vllm.fp8ext")


def register() -> None:
    """Make `--quantization blockfp8` known to vLLM. Idempotent; never raises, so that it can't break another server.

    A vLLM that lacks an interface we build on is reported when blockfp8 is asked for (`compat.probe`), not here.
    """
    try:
        from vllm_fp8ext.compat import install
    except ImportError as error:
        logger.warning("vllm-fp8ext is inactive: %s", error)
        return
    install.install()

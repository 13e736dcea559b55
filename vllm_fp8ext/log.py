# SPDX-License-Identifier: Apache-2.0
"""Says things once that every layer would say. Replaces nothing."""

import functools
import logging

logger = logging.getLogger("vllm.fp8ext")


@functools.cache
def log_once(message: str) -> None:
    """Log, unless this process has already."""
    logger.info(message, stacklevel=2)

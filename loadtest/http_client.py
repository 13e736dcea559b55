# SPDX-License-Identifier: Apache-2.0
"""HTTP without a proxy: what a load test asks beside its streams, which go to the server itself."""

from typing import Any

import httpx


def client(**options: Any) -> httpx.Client:
    """Make a client that reads no proxy from the environment. `options`: of `httpx.Client`."""
    return httpx.Client(transport=httpx.HTTPTransport(), **options)

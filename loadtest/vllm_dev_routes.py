# SPDX-License-Identifier: Apache-2.0
"""VllmDevRoutes of stock vLLM's dev mode (`VLLM_SERVER_DEV_MODE=1`)."""

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm_fp8ext.loadtest import http_client


class VllmDevRoutes:
    """Calls the dev routes of the server at `url`."""

    def __init__(self, url: str) -> None:
        self._http = http_client.client(base_url=url, timeout=600)

    def call(self, path: str, **arguments: Any) -> None:
        """POST.

        Raises:
            httpx.HTTPError: the server refused, or can't be reached.
        """
        self._http.post(path, **arguments).raise_for_status()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around new weights, as vLLM's documentation asks: generation pauses, and nothing cached of the old ones is used."""
        self.call("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            yield
            self.call("/reset_prefix_cache")
        finally:
            self.call("/resume")

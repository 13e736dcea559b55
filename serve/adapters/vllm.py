# SPDX-License-Identifier: Apache-2.0
"""Client by which trainer engines of vLLM push typed handles, where vLLM's own pickles them.

engine = IPCTrainerWeightTransferEngine.trainer_init(
    IPCTrainerInitInfo(rank=0, packed=True), client=WeightSyncClient("http://rollout:8000", key), source=ModuleSource(model)
)
engine.send_weights()
"""

import ssl
from functools import cache
from typing import Any

import httpx

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client.flow import Endpoint
from vllm_fp8ext.update.contract.native_handles import plain


class WeightSyncClient:
    """A `VLLMWeightSyncClient` that sends the admin key; `timeout` in seconds, of each call.

    Methods raise `UpdateError` with what the server says when it refuses.
    """

    def __init__(self, base_url: str, key: str | None = None, timeout: float = 300) -> None:
        endpoint = Endpoint.of(base_url, key, timeout=timeout, retries=0)
        self._url, self._timeout, self._auth = endpoint.url, timeout, ("fp8ext", endpoint.key or "")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Introduce the trainer."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        """Take leave."""
        self._post("shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Open an update."""
        self._post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Send what one call brings, handles as plain data."""
        parts = update_info if isinstance(update_info, list) else [update_info]
        typed = [
            {name: plain(value) if name == "ipc_handles" else value for name, value in part.items()}
            for part in parts
        ]
        body = typed if isinstance(update_info, list) else typed[0]
        self._post("update_weights", {"update_info": body})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have what came served, as this version."""
        self._post("finish_weight_update", {"weight_version": weight_version} if weight_version else None)

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        reply = httpx.post(
            f"{self._url}/{path}",
            json=json,
            auth=self._auth,
            timeout=self._timeout,
            verify=_certificates(),
        )
        if reply.is_error:
            error = reply.json().get("error")
            if error is None:
                reply.raise_for_status()
            raise UpdateError(error["type"], error["message"], status=reply.status_code)


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: to read them takes longer than a call."""
    return httpx.create_ssl_context()

# SPDX-License-Identifier: Apache-2.0
"""prime-rl's own calls; its filesystem mode is `/update_weights` with a folder (`transfer`)."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.native.answers import Endpoint
from vllm_fp8ext.update.contract.operations import Operation


class PrimeRlRoutes:
    """Endpoints on one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def posts(self) -> Mapping[str, Endpoint]:
        """Endpoints of POST, by path."""
        return {"/init_broadcaster": self.init_broadcaster}

    @property
    def gets(self) -> Mapping[str, Endpoint]:
        """Endpoints of GET, by path."""
        return {"/liveness": self.liveness}

    async def liveness(self, request: Request) -> Any:
        """Tell that the engine answers."""
        await self._backend.engine(Operation.STATUS)
        return {"status": "ok"}

    async def init_broadcaster(self, request: Request) -> Any:
        """Refuse its NCCL broadcast: workers would have to run code that prime-rl brings."""
        message = (
            'prime-rl\'s NCCL broadcast is not served: expected its filesystem mode (weight_broadcast.type = "filesystem"), '
            "which calls /update_weights with a folder under allowed_dirs"
        )
        raise UpdateError("not-served", message)

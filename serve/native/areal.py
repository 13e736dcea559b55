# SPDX-License-Identifier: Apache-2.0
"""AReaL's own calls, as far as weights come by disk."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import commits, schema
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.native.answers import Endpoint, body_of
from vllm_fp8ext.serve.work import run_to_end


class ArealRoutes:
    """Endpoints on one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def posts(self) -> Mapping[str, Endpoint]:
        """Endpoints of POST, by path."""
        return {
            "/areal_update_weights": self.update,
            "/areal_pause_generation": self.pause,
            "/areal_continue_generation": self.resume,
            "/areal_init_weights_update_group": self.refuse_broadcast,
        }

    @property
    def gets(self) -> Mapping[str, Endpoint]:
        """Endpoints of GET, by path."""
        return {}

    async def update(self, request: Request) -> Any:
        """Serve the checkpoint in a folder."""
        body = await body_of(request, "ArealBody", self._backend.bodies)
        loading = commits.load(self._backend, schema.Load(path=body["model_path"]), through_pause=True)
        update = await run_to_end(loading)
        return {"success": True, "message": f"epoch {(update.result or {})['epoch']} is served"}

    async def pause(self, request: Request) -> Any:
        """Stop generation; requests that run end with what they have."""
        await request.app.state.engine_client.pause_generation(mode="abort")
        return {"success": True, "message": "Generation paused"}

    async def resume(self, request: Request) -> Any:
        """Go on."""
        await request.app.state.engine_client.resume_generation()
        return {"success": True, "message": "Generation continued"}

    async def refuse_broadcast(self, request: Request) -> Any:
        """Refuse its own NCCL broadcast: workers would have to run code that AReaL brings."""
        message = "AReaL's xccl updates are not served: expected updates from disk (weight_update_mode=disk)"
        raise UpdateError("not-served", message)

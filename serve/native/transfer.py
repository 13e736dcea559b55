# SPDX-License-Identifier: Apache-2.0
"""The calls by which vLLM's weight transfer brings new weights."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from vllm_fp8ext.compat.update.native_calls import NativeTransfer
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import commits, schema
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.native.answers import Endpoint, body_of
from vllm_fp8ext.serve.work import run_to_end
from vllm_fp8ext.update.contract.results import UpdateState

_LISTED = 100
"""Most names of tensors that an answer lists."""


class TransferRoutes:
    """Endpoints on one backend. What has begun runs to its end, whether the trainer waits for it or not."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def posts(self) -> Mapping[str, Endpoint]:
        """Endpoints of POST, by path."""
        return {
            "/init_weight_transfer_engine": self.init,
            "/shutdown_weight_transfer_engine": self.shutdown,
            "/start_weight_update": self.start,
            "/start_draft_weight_update": self.start_draft,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/update_weight_version": self.relabel,
        }

    @property
    def gets(self) -> Mapping[str, Endpoint]:
        """Endpoints of GET, by path."""
        return {"/weight_info": self.weight_info, "/get_world_size": self.world_size}

    @property
    def _transfer(self) -> NativeTransfer:
        backend = self._backend
        return NativeTransfer(backend.engine, backend.receive_seconds, read_pickles=backend.read_pickles)

    async def init(self, request: Request) -> Any:
        """Join a trainer's group."""
        body = await self._body(request, "InitBody")
        await run_to_end(_nothing(self._transfer.init(body["init_info"])))
        return {"message": "Weight transfer initialized"}

    async def shutdown(self, request: Request) -> Any:
        """Leave it."""
        await run_to_end(_nothing(self._transfer.shutdown()))
        return {"message": "Weight transfer shut down"}

    async def start(self, request: Request) -> Any:
        """Open an update."""
        if not (await self._body(request, "StartBody"))["is_checkpoint_format"]:
            message = "is_checkpoint_format: expected true: tensors come as in a checkpoint, found false"
            raise UpdateError("invalid-request", message, status=422)
        await self._transfer.start()
        return {"message": "Weight update started"}

    async def start_draft(self, request: Request) -> Any:
        """Refuse: there is no draft model."""
        await self._transfer.refuse_draft()

    async def update(self, request: Request) -> Any:
        """Receive tensors; or, for prime-rl, load a folder."""
        body = await self._body(request, "UpdateBody")
        if (body["update_info"] is None) == (body["weight_dir"] is None):
            raise UpdateError(
                "invalid-request", "expected update_info or weight_dir, one of them", status=422
            )
        if body["weight_dir"] is not None:
            await run_to_end(
                commits.load(self._backend, schema.Load(path=body["weight_dir"]), through_pause=True)
            )
            return {"status": "ok"}
        await run_to_end(_nothing(self._transfer.update(body["update_info"])))
        return {"message": "Weights updated"}

    async def finish(self, request: Request) -> Any:
        """Serve what came, and tell what did not."""
        version = (await self._body(request, "FinishBody"))["weight_version"]
        update, kept = await run_to_end(self._finish(version))
        result = update.result or {}
        return {
            "message": "Weight update finished",
            "epoch": result["epoch"],
            "weight_version": result["version"],
            "kept_count": len(kept),
            "kept": kept[:_LISTED],
        }

    async def _finish(self, version: str | None) -> tuple[UpdateState, list[str]]:
        async with self._backend.status_refreshed():
            return await self._transfer.finish(version)

    async def relabel(self, request: Request) -> Any:
        """Give what is served another version."""
        version = (await self._body(request, "VersionBody"))["new_version"]
        await self._transfer.relabel(version)
        return {"success": True, "new_version": version}

    async def weight_info(self, request: Request) -> Any:
        """Tell which version is served."""
        return {"weight_version": await self._transfer.version()}

    async def world_size(self, request: Request) -> Any:
        """Tell how many ranks receive."""
        parallel = request.app.state.engine_client.vllm_config.parallel_config
        across = request.query_params.get("include_dp", "true").lower() in ("true", "1")
        return {"world_size": parallel.world_size_across_dp if across else parallel.world_size}

    async def _body(self, request: Request, form: str) -> dict[str, Any]:
        return await body_of(request, form, self._backend.bodies)


async def _nothing(call: Any) -> dict[str, Any]:
    await call
    return {}

# SPDX-License-Identifier: Apache-2.0
"""Endpoints that pause generation, give memory back, and describe the server."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.native.answers import Endpoint, body_of, choice, closed, flag
from vllm_fp8ext.serve.native.worker_extension import require_method
from vllm_fp8ext.serve.work import outcome, run_to_end
from vllm_fp8ext.update.contract.operations import Operation

_MODES = ("abort", "wait", "keep")


class ControlRoutes:
    """Endpoints on one backend, whose engine client is that of the application."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def posts(self) -> Mapping[str, Endpoint]:
        """Endpoints of POST, by path."""
        return {
            "/pause": self.pause,
            "/resume": self.resume,
            "/abort_requests": self.abort_requests,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/collective_rpc": self.collective_rpc,
        }

    @property
    def gets(self) -> Mapping[str, Endpoint]:
        """Endpoints of GET, by path."""
        return {
            "/is_paused": self.is_paused,
            "/is_sleeping": self.is_sleeping,
            "/server_info": self.server_info,
        }

    async def pause(self, request: Request) -> Any:
        """Stop generation until `/resume`."""
        mode, clear = choice(request, "mode", _MODES, "abort"), flag(request, "clear_cache", True)
        await run_to_end(_done(_client(request).pause_generation(mode=mode, clear_cache=clear)))
        self._backend.refresh_status_soon()
        return {"status": "paused"}

    async def resume(self, request: Request) -> Any:
        """Go on."""
        await _client(request).resume_generation()
        self._backend.refresh_status_soon()
        return {"status": "resumed"}

    async def is_paused(self, request: Request) -> Any:
        """Tell whether generation is paused."""
        return {"is_paused": await _client(request).is_paused()}

    async def abort_requests(self, request: Request) -> Any:
        """End these requests, or all."""
        ids = (await body_of(request, "AbortBody", self._backend.bodies))["request_ids"]
        client = _client(request)
        if ids:
            await client.abort(ids)
        else:
            outputs = client.output_processor
            ids = [*outputs.request_states, *outputs.parent_requests]
            await client.abort(ids, internal=True)
        return {"status": "aborted", "aborted": len(ids)}

    async def sleep(self, request: Request) -> Any:
        """Give memory back; level 0 pauses alone."""
        level = int(choice(request, "level", ("0", "1", "2"), "1"))
        mode = choice(request, "mode", _MODES, "abort")
        if level:
            await self._backend.engine(Operation.MAY_SLEEP)
            await run_to_end(_done(self._backend.engine.sleep(level, mode)))
        else:
            await run_to_end(_done(_client(request).sleep(level, mode)))
        self._backend.refresh_status_soon()
        return {"status": "sleeping", "level": level}

    async def wake_up(self, request: Request) -> Any:
        """Take memory again."""
        tags = request.query_params.getlist("tags") or None
        unknown = sorted(set(tags or ()) - {"weights", "kv_cache", "scheduling"})
        if unknown:
            message = f"tags: expected weights, kv_cache or scheduling, found {', '.join(unknown)!r:.100}"
            raise UpdateError("invalid-request", message, status=400)
        await run_to_end(_done(self._backend.engine.wake(tags)))
        self._backend.refresh_status_soon()
        asleep = await _client(request).is_sleeping()
        return {"status": "sleeping" if asleep else "awake", "tags": tags}

    async def is_sleeping(self, request: Request) -> Any:
        """Tell whether memory was given back."""
        return {"is_sleeping": await _client(request).is_sleeping()}

    async def reset_prefix_cache(self, request: Request) -> Any:
        """Forget cached prefixes."""
        success = await _client(request).reset_prefix_cache(
            flag(request, "reset_running_requests", False), flag(request, "reset_external", False)
        )
        return {"success": bool(success)}

    async def collective_rpc(self, request: Request) -> Any:
        """Call a method of the worker extension on every worker.

        Weights that it loads are an update, which has been served, or refused, when this answers. It has no time limit.

        Without an extension the route is closed (403).

        Raises:
            UpdateError: `invalid-request`: no public method that the extension defines.
        """
        client = _client(request)
        extension = client.vllm_config.parallel_config.worker_extension_cls
        if not extension:
            return closed("/collective_rpc is closed on a blockfp8 server without --worker-extension-cls")
        body = await body_of(request, "RpcBody", self._backend.bodies)
        await asyncio.to_thread(require_method, extension, body["method"])
        call = self._backend.engine.collective_rpc(body["method"], tuple(body["args"]), body["kwargs"])
        try:
            results = await run_to_end(call)
        except Exception:  # the poison guard knows before anybody is told
            await outcome(self._backend.refresh_status())
            raise
        self._backend.refresh_status_soon()
        return {"results": [r if r is None or isinstance(r, dict | list) else str(r) for r in results]}

    async def server_info(self, request: Request) -> Any:
        """Tell how the server was started, as far as trainers ask."""
        described = described_config(_client(request).vllm_config)
        text = choice(request, "config_format", ("text", "json"), "text") == "text"
        return {"vllm_config": str(described) if text else described, "vllm_env": {}, "system_env": {}}


def described_config(config: Any) -> dict[str, Any]:
    """Return what trainers read of a `VllmConfig`, and no secret."""
    model, parallel = config.model_config, config.parallel_config
    transfer = getattr(config, "weight_transfer_config", None)
    return {
        "model_config": {
            "model": str(model.model),
            "served_model_name": model.served_model_name,
            "dtype": str(model.dtype),
            "quantization": model.quantization,
            "max_model_len": model.max_model_len,
            "max_logprobs": model.max_logprobs,
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "enable_sleep_mode": model.enable_sleep_mode,
        },
        "parallel_config": {
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "world_size": parallel.world_size,
        },
        "cache_config": {"cache_dtype": config.cache_config.cache_dtype},
        "lora_config": None
        if config.lora_config is None
        else {"max_loras": config.lora_config.max_loras, "max_lora_rank": config.lora_config.max_lora_rank},
        "weight_transfer_config": None if transfer is None else {"backend": _written(transfer.backend)},
    }


def _written(backend: str) -> str:
    """Return the name that the user wrote for an engine of weight transfer."""
    from vllm_fp8ext.compat.update.native_engines import configured_name

    return configured_name(backend)


def _client(request: Request) -> Any:
    return request.app.state.engine_client


async def _done(call: Any) -> dict[str, Any]:
    await call
    return {}

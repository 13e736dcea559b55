# SPDX-License-Identifier: Apache-2.0
"""Calls the engine core from the API server.

Replaces nothing; uses the asynchronous utility call that vLLM's own client methods use. Can go once `EngineClient` has a
public way to call a plugin's utility method.
"""

import asyncio
from typing import Any

from vllm_fp8ext.errors import UpdateError


class EngineCalls:
    """Operations of the update engine, awaited; each answers within its deadline or raises."""

    def __init__(self, engine_client: Any, deadline_seconds: float) -> None:
        self._core = engine_client.engine_core
        self._deadline = deadline_seconds

    async def __call__(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation.

        Raises:
            UpdateError: what the operation refused, or `engine-timeout`, or `engine-dead`.
        """
        try:
            async with asyncio.timeout(self._deadline):
                result: dict[str, Any] = await self._core.call_utility_async("fp8ext", operation, arguments)
        except TimeoutError:
            message = f"the engine did not answer {operation} within {self._deadline:g} s"
            raise UpdateError("engine-timeout", message, status=504) from None
        except Exception as error:
            raise UpdateError("engine-dead", f"the engine failed: {error}", status=500) from error
        return _unwrapped(result)

    async def job(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation that starts a job, and wait for the job's result."""
        started = await self(operation, **arguments)
        pause = 0.002
        try:
            async with asyncio.timeout(self._deadline):
                while True:
                    result = await self("poll", job=started["job"])
                    if result["done"]:
                        return _unwrapped(result)
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, 0.05)
        except TimeoutError:
            message = f"{operation} was not done within {self._deadline:g} s"
            raise UpdateError("engine-timeout", message, status=504) from None


def _unwrapped(result: dict[str, Any]) -> dict[str, Any]:
    if "error" in result:
        raise UpdateError.from_dict(result["error"])
    return result

# SPDX-License-Identifier: Apache-2.0
"""A vLLM endpoint plugin for `upload.py`: a route that reads a body and does nothing with it."""

from typing import Any

from fastapi import FastAPI, Request


class BareUpload:
    """Adds `PUT /bare`."""

    name = "fp8ext_bare"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        @app.put("/bare")
        async def bare(request: Request) -> dict[str, int]:
            received = 0
            async for piece in request.stream():
                received += len(piece)
            return {"bytes": received}

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        return None

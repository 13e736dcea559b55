# SPDX-License-Identifier: Apache-2.0
"""A streaming server that does nothing but send tokens at fixed times: what the load generator itself is measured against.

    python -m vllm_fp8ext.loadtest.trivial_server --port 8001 --interval 0.02

It answers `/v1/completions` and `/v1/chat/completions` as vLLM does, with `max_tokens` tokens, `/v1/models`, `/version` and
`/metrics` (of vLLM's, the number of requests that were answered in full).
"""

import argparse
import asyncio
import json
from typing import Any

MODEL = "trivial"


class TrivialConnection(asyncio.Protocol):
    """One client connection; requests come one after the other."""

    answered = 0
    """Streams of all connections that were sent to their end."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._transport: Any = None
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        if len(rest) < length:
            return
        self._received = rest[length:]
        path = lines[0].split()[1].decode()
        if path.startswith("/v1/") and path.endswith("completions"):
            self._stream(json.loads(rest[:length]))
        else:
            self._answer(path)

    def _answer(self, path: str) -> None:
        bodies = {"/v1/models": {"data": [{"id": MODEL}]}, "/version": {"version": "trivial"}}
        body = json.dumps(bodies.get(path, {})).encode()
        if path == "/metrics":
            body = f"vllm:request_success_total {TrivialConnection.answered}\n".encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _stream(self, request: dict[str, Any]) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        says = '"delta":{"content":"x"}' if "messages" in request else '"text":"x"'
        self._token(loop, loop.time() + self.interval, int(request["max_tokens"]), says)

    def _token(self, loop: asyncio.AbstractEventLoop, due: float, left: int, says: str) -> None:
        def send() -> None:
            finish = "null" if left > 1 else '"length"'
            choice = f'{{"index":0,{says},"token_ids":[7],"finish_reason":{finish}}}'
            self._chunk(f'data: {{"choices":[{choice}]}}\n\n')
            if left > 1:
                self._token(loop, due + self.interval, left - 1, says)
            else:
                self._chunk("data: [DONE]\n\n")
                self._transport.write(b"0\r\n\r\n")
                TrivialConnection.answered += 1

        self._timer = loop.call_at(due, send)

    def _chunk(self, text: str) -> None:
        self._transport.write(f"{len(text):x}\r\n{text}\r\n".encode())


async def serve(port: int, interval: float) -> asyncio.Server:
    """Start serving on this machine; tokens of one stream are `interval` seconds apart."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: TrivialConnection(interval), "127.0.0.1", port, backlog=4096)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between tokens of one stream")
    options = parser.parse_args()

    async def forever() -> None:
        server = await serve(options.port, options.interval)
        await server.serve_forever()

    asyncio.run(forever())


if __name__ == "__main__":
    main()

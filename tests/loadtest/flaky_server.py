# SPDX-License-Identifier: Apache-2.0
"""A server whose answers go wrong in the way that the asked model is called."""

import asyncio
import json
import sys

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "text": "x", "token_ids": [1, 2], "finish_reason": finish, **more}
    return chunk(f"data: {json.dumps({'choices': [choice]})}\n\n")


def chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


def chat(finish: str | None = None, **delta: object) -> bytes:
    """A part of a chat's stream without token ids."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return chunk(f"data: {json.dumps({'choices': [choice], 'error': None})}\n\n")


def used(tokens: int, *choices: object) -> bytes:
    usage = {"prompt_tokens": 9, "completion_tokens": tokens}
    return chunk(f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n")


END = chunk("data: [DONE]\n\n") + b"0\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(
        next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))[15:]
    )
    mood = json.loads(await reader.readexactly(length))["model"]
    if mood == "hang":
        await asyncio.sleep(3600)
    elif mood == "reset":
        writer.write(HEAD + event())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        return
    else:
        writer.write(refused(mood) or broken(mood) or streamed(mood))
    await writer.drain()
    writer.close()


def refused(mood: str) -> bytes | None:
    """An answer without events."""
    if mood.startswith("http-"):
        return f"HTTP/1.1 {mood[5:]} No\r\nContent-Length: 0\r\n\r\n".encode()
    problem = b'{"error": {"message": "Token id 742 is out\\n of vocabulary", "code": 400}}'
    return {
        "refusal": b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n%s" % (len(problem), problem),
        "plain refusal": b"HTTP/1.1 503 No\r\nContent-Length: 304\r\n\r\nbusy" + 300 * b"!",
        "half a refusal": b"HTTP/1.1 502 No\r\nContent-Length: 304\r\n\r\nbusy",
        "not http": b"hello\r\n\r\n",
    }.get(mood)


def broken(mood: str) -> bytes | None:
    """Events that do not end as they should."""
    return {
        "garbage": HEAD + chunk("data: {nonsense\n\n"),
        "other events": HEAD + event() + chunk('data: {"choices": ["x"]}\n\n'),
        "truncated": HEAD + event() + b"0\r\n\r\n",
        "no finish": HEAD + event() + END,
        "error event": HEAD + event() + chunk('data: {"error": {"message": "no"}}\n\n'),
        "abort": HEAD + event("abort") + END,
    }.get(mood)


def streamed(mood: str) -> bytes:
    """Events of a whole answer."""
    if mood == "usage":
        plain = chunk('data: {"choices": [{"index": 0, "text": "x", "finish_reason": null}]}\n\n')
        last = chunk('data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n')
        return HEAD + plain * 3 + last + used(7) + END
    if mood.startswith("delta "):  # three parts of this delta, then two of content
        first, empty = chat(role="assistant", content=""), chat("stop", content=None)
        thought = chat(**json.loads(mood[6:]))
        return HEAD + first + thought * 3 + chat(content="x") * 2 + empty + used(7) + END
    if mood == "silent":
        return HEAD + chat(role="assistant", content="") + chat("length") + used(7) + END
    if mood == "continuous usage":  # the second part's token has no text yet
        parts = [{"index": 0, "text": text, "finish_reason": None} for text in ("x", "", "xyz")]
        counted = b"".join(used(tokens, part) for tokens, part in zip((1, 2, 5), parts, strict=True))
        finish = used(5, {"index": 0, "text": "", "finish_reason": "length"})
        return HEAD + counted + finish + used(5) + END
    spans = [
        {"version": "a", "epoch": 3, "start": 0, "end": 3},
        {"version": "b", "epoch": 4, "start": 3, "end": 4},
    ]
    return HEAD + event() + event("length", weight_versions=spans) + END


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(0)

# SPDX-License-Identifier: Apache-2.0
"""Processor time of the API server's process, by replaying what an engine core sends: no engine, no GPU, no sockets.

    python benchmarks/api_process.py --cases 128 128:logprobs=0 128:chat:logprobs=0:streamed --out api_process.json
    python benchmarks/api_process.py --variant bf16 ...

Requests go through vLLM's application, from the body to the answer's last byte. Made-up tokens of all steps are packed into
messages as a `blockfp8` engine core sends them (`bf16`: as stock vLLM's does), and each message is decoded and processed
until this process has nothing to do. A first turn is not measured. A case tells microseconds a token, milliseconds of the
message that ended most answers, the longest other messages, and what Python's garbage collector took.
"""

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_fp8ext.bench.http_client import ROUTES, HttpLoad
from vllm_fp8ext.bench.options import json_object
from vllm_fp8ext.bench.over_http import load_of
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.bench.tokenizer import write_tokenizer
from vllm_fp8ext.environment import ADMIN_KEY

VOCABULARY = 151_936
STEP_SECONDS = 0.007
"""Seconds between messages, as a GPU takes for a step of 128 requests."""
STEP_TOKENS = 8192
"""Tokens of prompts in a step."""


def main() -> int:
    options = _options()
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["VLLM_PLUGINS"] = "fp8ext" if options.variant == "blockfp8" else ""
    os.environ.setdefault(ADMIN_KEY, "of-a-benchmark-without-engine")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_run(Path(folder), options))
        sys.stdout.flush()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", default=["128", "128:logprobs=0"], help="as of fp8ext bench http"
    )
    parser.add_argument("--variant", choices=("blockfp8", "bf16"), default="blockfp8")
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--repeat", type=int, default=3, help="turns of a case; the fastest one is told")
    parser.add_argument("--settings", type=json_object, default={}, help="of blockfp8, as JSON")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


async def _run(folder: Path, options: argparse.Namespace) -> None:
    client, app = await _application(folder, options)
    collections = _watch_collector()
    origin, cases = provenance(), []
    for text in options.cases:
        load = HttpLoad(**vars(load_of(text, options)) | {"vocabulary": VOCABULARY})
        turns = []
        for turn in range(options.repeat + 1):
            told = await _turn(client, app, load, options, collections)
            if turn:
                turns.append(told)
            elif not cases:
                gc.collect()
                gc.freeze()  # as vLLM does when its server starts
        asked = {"requests": load.requests, "route": load.route, "logprobs": load.logprobs}
        asked |= {"streamed": load.streamed, "one_request": load.one_request, "variant": options.variant}
        cases.append(asked | min(turns, key=lambda told: told["us_per_token"]))
        print(json.dumps(cases[-1]), flush=True)
        write_cases(options.out, origin, cases)


async def _turn(
    client: Any, app: Any, load: HttpLoad, options: Any, collections: list[Any]
) -> dict[str, Any]:
    """Ask, and process the messages that answer."""
    client.added.clear()
    asked = [asyncio.ensure_future(_ask(app, body, ROUTES[load.route])) for body in load.bodies(0)]
    while len(client.added) < load.requests:
        await asyncio.sleep(0.001)
        for one in asked:
            if one.done():
                raise RuntimeError(f"expected answers after messages, found {one.result()}")
    messages = _messages(list(client.added), load, options)
    gc.collect()
    collections.clear()
    seconds = []
    for frames in messages:
        begin = time.thread_time()
        client.outputs_queue.put_nowait(client.decoder.decode(frames))
        for _ in range(12):  # as many wake each other
            await asyncio.sleep(0)
        seconds.append(time.thread_time() - begin)
    begin = time.thread_time()
    statuses = await asyncio.gather(*asked)
    seconds[-1] += time.thread_time() - begin
    if set(statuses) != {200}:
        raise RuntimeError(f"expected 200 of all, found {statuses}")
    *others, ends = sorted(seconds[-20:])
    longest = sorted(seconds[:-20] + others, reverse=True)[:4]
    return {
        "us_per_token": round(sum(seconds) / (load.requests * load.output) * 1e6, 2),
        "end_ms": round(ends * 1e3, 1),
        "longest_ms": [round(each * 1e3, 1) for each in longest],
        "messages": len(messages),
        "collections": [sum(each[0] == age for each in collections) for age in range(3)],
        "longest_collection_ms": round(max((each[1] for each in collections), default=0.0) * 1e3, 1),
    }


async def _ask(app: Any, body: dict[str, Any], path: str) -> int:
    """The status of an answer, once its last byte is written."""
    raw, status = json.dumps(body).encode(), [0]
    waiting = [raw]
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        await never.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        status[0] = message.get("status", status[0])

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
    }
    scope |= {"raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"", "state": {}}
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    await app(scope, receive, send)
    return status[0]


def _messages(requests: list[Any], load: HttpLoad, options: Any) -> list[list[bytes]]:
    """Encode the messages that an engine core sends of these requests."""
    import numpy as np
    from vllm.v1.engine import (
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
        FinishReason,
    )
    from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackEncoder

    encoder, sent = MsgpackEncoder(), []
    states = {
        request.request_id: SimpleNamespace(
            sampling_params=request.sampling_params, resumable=False, num_output_tokens=0
        )
        for request in requests
    }

    def put(item: Any) -> None:
        sent.append([bytes(frame) for frame in encoder.encode(item[1])])

    hold = _holding(states, put, options)
    draw = np.random.default_rng(0)
    waiting, running, now, seen = list(requests), [], 1000.0, set()
    while waiting or running:
        now += STEP_SECONDS
        room, fresh = STEP_TOKENS, set()
        while waiting:
            prompt = tuple(waiting[0].prompt_token_ids[:16])
            room -= 16 if prompt in seen else load.tokens  # the rest is cached
            if room < 0 and fresh:
                break
            seen.add(prompt)
            fresh.add(waiting[0].request_id)
            running.append(waiting.pop(0))
        count, width = len(running), 0 if load.logprobs is None else load.logprobs + 1
        ids = draw.integers(0, VOCABULARY, (count, max(width, 1)), dtype=np.int32)
        step = LogprobsLists(ids, -20 * draw.random(ids.shape, dtype=np.float32), ids[:, 0] + 1)
        outputs = []
        for index, request in enumerate(running):
            state = states[request.request_id]
            state.num_output_tokens += 1
            output = EngineCoreOutput(request.request_id, [int(ids[index, 0])])
            if width:
                output.new_logprobs = step.slice_request(index, 1)
            if request.request_id in fresh:
                output.prefill_stats = PrefillStats()
                output.events = [
                    EngineCoreEvent(EngineCoreEventType.QUEUED, now - 0.05),
                    EngineCoreEvent(EngineCoreEventType.SCHEDULED, now - 0.02),
                ]
            if state.num_output_tokens == load.output:
                output.finish_reason = FinishReason.LENGTH
            outputs.append(output)
        stats = SchedulerStats(num_running_reqs=count)
        hold(
            (0, EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=now, weight_version="0"))
        )
        running = [one for one in running if states[one.request_id].num_output_tokens < load.output]
    return sent


def _holding(states: dict[str, Any], put: Callable[[Any], None], options: Any) -> Callable[[Any], None]:
    """Return a function that passes messages on to `put`, as a variant's engine core does."""
    if options.variant != "blockfp8":
        return put
    from vllm_fp8ext.compat.speed import output_interval
    from vllm_fp8ext.config import Settings

    core = SimpleNamespace(
        output_queue=SimpleNamespace(get=lambda: item.pop()),
        scheduler=SimpleNamespace(requests=states),
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(stream_interval=1)),
    )
    item: list[Any] = []
    output_interval.attach(core, Settings.parse({"fp8ext": options.settings}).serving)

    def hold(message: Any) -> None:
        item.append(message)
        while True:
            try:
                put(core.output_queue.get())
            except IndexError:  # nothing is ready, and nothing was queued
                return

    return hold


async def _application(folder: Path, options: Any) -> tuple[Any, Any]:
    """vLLM's application over a client that has no engine."""
    from transformers import Qwen3Config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ModuleNotFoundError:  # vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import make_arg_parser

    config = Qwen3Config(vocab_size=VOCABULARY, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    write_tokenizer(folder)
    load_general_plugins()
    line = [
        "--model",
        str(folder),
        "--served-model-name",
        "model",
        "--enable-scale-out",
        "--dtype",
        "bfloat16",
    ]
    line += ["--max-model-len", str(2 * options.input + options.output + 64), "--enforce-eager"]
    if options.variant == "blockfp8":
        from vllm_fp8ext.serve.plugin import Fp8ExtEndpoints

        async def connect(*_: Any) -> None:
            """Nobody answers calls of updates."""

        Fp8ExtEndpoints.init_state = connect
        line += ["--quantization", "blockfp8"]
        line += ["--additional-config", json.dumps({"fp8ext": options.settings})]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    arguments.model_tag = arguments.model
    client = _client()
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: client)
    engine_config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    engine = AsyncLLM.from_vllm_config(engine_config)
    app = build_app(arguments, ("generate",), engine_config.model_config)
    await init_app_state(engine, app.state, arguments, ("generate",))
    app.middleware_stack = app.build_middleware_stack()
    return client, app


def _client() -> Any:
    """A client of an engine core that takes requests and sends nothing by itself."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    class Client(AsyncMPClient):
        def __init__(self) -> None:
            self.outputs_queue = asyncio.Queue()
            self.added: list[Any] = []
            self.engine_ranks_managed, self.client_index = [0], 0
            self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
            self.resources = SimpleNamespace(engine_dead=False)

        def _ensure_output_queue_task(self) -> None: ...

        async def add_request_async(self, request: Any) -> None:
            self.encoder.encode(request)
            self.added.append(request)

        async def get_supported_tasks_async(self) -> tuple[str, ...]:
            return ("generate",)

        async def abort_requests_async(self, request_ids: list[str]) -> None: ...

        def shutdown(self, timeout: float | None = None) -> None: ...

        def __del__(self) -> None: ...

    return Client()


def _watch_collector() -> list[tuple[int, float]]:
    """A list to which each collection's generation and seconds are added."""
    collections: list[tuple[int, float]] = []
    begin = [0.0]

    def watch(phase: str, facts: dict[str, int]) -> None:
        if phase == "start":
            begin[0] = time.thread_time()
        else:
            collections.append((facts["generation"], time.thread_time() - begin[0]))

    gc.callbacks.append(watch)
    return collections


if __name__ == "__main__":
    raise SystemExit(main())

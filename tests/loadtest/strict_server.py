# SPDX-License-Identifier: Apache-2.0
"""The trivial server with a small vocabulary, as vLLM refuses token ids, and with `/fp8ext/v1` behind its key, where every
update is refused, or with `HOLD` set not answered. It deletes the folder `FORGET` once it has answered."""

import json
import os
import shutil

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.loadtest import trivial_server
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.schema import PREFIX, PROBLEM, Weights

KEY = "right"
VOCABULARY = 100
SERVED = Weights(
    epoch=1, version="early", state="serving", poisoned=None, update=None, previous_version=None, previous_epoch=None,
    scale_format="fp32", kv_scales=None, kv_cache_dtype="auto", staging="shadow", twin_bytes=[0], stall_seconds=None,
    compiled=[], twin_kv_blocks=0, last_update=None,
)  # fmt: skip


class Strict(trivial_server.TrivialConnection):
    head = b""

    def data_received(self, data: bytes) -> None:
        self.head = (self._received + data).partition(b"\r\n\r\n")[0]
        super().data_received(data)

    def _answer(self, path: str) -> None:
        if not path.startswith(PREFIX):
            super()._answer(path)
            return
        lines = self.head.decode().split("\r\n")
        given = [line.partition(": ")[2] for line in lines if line.lower().startswith("authorization:")]
        try:
            AdminKey(KEY).check(given[0] if given else None)
            if path == PREFIX + "/updates" and "HOLD" in os.environ:
                return
            if path != PREFIX + "/weights":
                raise UpdateError("internal", "no room for [weights]", status=500)
        except UpdateError as error:
            problem = {"type": PROBLEM + error.kind, "status": error.status, "detail": str(error)}
            self._whole(error.status, problem)
            return
        self._whole(200, SERVED.model_dump(mode="json"))

    def _stream(self, asked: dict) -> None:
        worst = max(asked["prompt"])
        if worst >= VOCABULARY:
            message = f"Token id {worst} is out of vocabulary"
            self._whole(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
            return
        super()._stream(asked)
        if "FORGET" in os.environ:
            shutil.rmtree(os.environ["FORGET"], ignore_errors=True)

    def _whole(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} So\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self._transport.write(head.encode() + content)


if __name__ == "__main__":
    trivial_server.TrivialConnection = Strict  # type: ignore[misc]  # what this server makes for each client
    trivial_server.main()

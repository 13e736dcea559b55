# SPDX-License-Identifier: Apache-2.0
"""The trivial server, which crashes in the middle of an answer once it has sent another one to its end."""

import os

from vllm_fp8ext.loadtest import trivial_server


class Crashing(trivial_server.TrivialConnection):
    sent = 0

    def _chunk(self, text: str) -> None:
        super()._chunk(text)
        self.sent = 0 if "[DONE]" in text else self.sent + 1
        if trivial_server.TrivialConnection.answered and self.sent == 3:
            os._exit(9)


if __name__ == "__main__":
    trivial_server.TrivialConnection = Crashing  # type: ignore[misc]  # what this server makes for each client
    trivial_server.main()

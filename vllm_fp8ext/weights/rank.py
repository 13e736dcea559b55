# SPDX-License-Identifier: Apache-2.0
"""What one worker process does for an update. Methods never raise: they return plain results or a described error.

Staging and digests run on one thread of their own, one job after the other, so that engine steps go on; the exchange runs on
the worker's main thread, between steps.
"""

import hashlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vllm_fp8ext.errors import UpdateError, described
from vllm_fp8ext.kernels.reference import NonFiniteError
from vllm_fp8ext.weights.digest import combine, digest
from vllm_fp8ext.weights.twin import Twin

Result = dict[str, Any]


class Rank:
    """One rank's twin and its staging thread."""

    def __init__(self, twin: Twin, rank: int, kv_blocks: int) -> None:
        self.twin = twin
        self.rank = rank
        self.kv_blocks = kv_blocks
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], Result]]] = queue.SimpleQueue()
        self._results: dict[int, Result] = {}
        self._progress: dict[int, int] = {}
        self._thread: threading.Thread | None = None

    @described
    def describe(self) -> Result:
        """This rank's manifest, and what its twin costs."""
        return {
            "manifest": self.twin.manifest.as_dict(),
            "twin_bytes": self.twin.exchange.bytes,
            "twin_kv_blocks": self.kv_blocks,
        }

    @described
    def begin(self) -> Result:
        """The first tensor of an update is about to be staged: what the twin held is gone."""
        self.twin.stager.reset()
        return {}

    @described
    def stage(self, job: int, path: str, names: list[str]) -> Result:
        """Start to stage these tensors of a safetensors file; `poll(job)` tells the outcome."""
        return self._start(job, lambda: self._stage(job, Path(path), names))

    @described
    def digests(self, job: int) -> Result:
        """Start to compute this rank's digests of the live weights, and a SHA-256 over the path and storage
        address of each: the same as long as none has moved."""
        return self._start(job, self._digests)

    @described
    def poll(self, job: int) -> Result:
        """`{"done": False, "tensors": n}`, or the job's result with `"done": True` (once)."""
        if job not in self._results:
            return {"done": False, "tensors": self._progress.get(job, 0)}
        self._progress.pop(job, None)
        return {"done": True, **self._results.pop(job)}

    @described
    def exchange(self, only: list[int] | None = None) -> Result:
        """Swap live and twin contents, unless other ranks are named. A failure is undone; `broken` if that failed."""
        if only is not None and self.rank not in only:
            return {}
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                self.twin.commit()
        except Exception as error:
            failure = UpdateError("exchange-failed", f"rank {self.rank}: {error}", status=500)
            return {"error": failure.as_dict(), "broken": self.twin.exchange.broken}
        return {"seconds": time.perf_counter() - start}

    def _start(self, job: int, work: Callable[[], Result]) -> Result:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fp8ext-staging", daemon=True)
            self._thread.start()
        self._jobs.put((job, work))
        return {}

    def _run(self) -> None:
        device = self.twin.exchange.pairs[0][0].device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream(device))
        while True:
            job, work = self._jobs.get()
            with torch.inference_mode():
                result = described(work)()
                if device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
            self._results[job] = result

    def _stage(self, job: int, path: Path, names: list[str]) -> Result:
        start = time.perf_counter()
        problems: list[dict[str, Any]] = []
        error = norm = 0.0
        with safe_open(path, framework="pt") as reader:
            for count, name in enumerate(names):
                try:
                    more_error, more_norm = self.twin.stager.stage(name, reader.get_tensor(name))
                    error, norm = error + more_error, norm + more_norm
                except NonFiniteError:
                    problems.append({"kind": "non-finite", "tensor": name, "rank": self.rank})
                self._progress[job] = count + 1
        seconds = time.perf_counter() - start
        return {"problems": problems, "squared_error": error, "squared_norm": norm, "seconds": seconds}

    def _digests(self) -> Result:
        listed = "\n".join(f"{path} {address}" for path, address in self.twin.addresses().items())
        found = {}
        for name, pieces in self.twin.stager.pieces.items():
            found[name] = combine([digest(piece, *self.twin.served(piece.target)) for piece in pieces])
        addresses = hashlib.sha256(listed.encode()).hexdigest()
        return {"rank": self.rank, "digests": found, "addresses": addresses}

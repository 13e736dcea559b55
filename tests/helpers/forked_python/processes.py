# SPDX-License-Identifier: Apache-2.0
"""`Popen` and `run` for Python programs that import vLLM.

Where there is no GPU they are forked from a process that has imported it: that takes milliseconds instead of seconds.
"""

import atexit
import functools
import inspect
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forked_python.seed import Request, Seed, umask

_READ_AT_IMPORT = (
    *("HF_", "KMP_", "LD_", "MKL_", "OPENBLAS_", "PYTHON", "TORCH", "TRANSFORMERS_", "TRITON"),
    *("VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING"),
)
"""How variables begin that are read before a program's own code, or by modules as they are imported."""
_own: Seed | None = None
_READ_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED"}


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` for `[sys.executable, "-P", …]`, without the seconds that importing vLLM takes.

    A line, or variables, that a forked process cannot honour are executed.
    """

    def _execute_child(self, *arguments: Any) -> None:
        execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        options = inspect.signature(execute).bind(self, *arguments).arguments
        line = [os.fsdecode(word) for word in options["args"]]
        environment = dict(os.environ if options["env"] is None else options["env"])
        seed = _seed(environment) if line[:2] == [sys.executable, "-P"] else None
        if seed is None:
            execute(self, *arguments)
            return
        ends = [
            options[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        descriptors = {
            number: number if end == -1 else end for number, end in enumerate((ends[0], ends[3], ends[5]))
        }
        descriptors |= {int(number): int(number) for number in options["pass_fds"]}
        request = Request(
            arguments=line[2:],
            environment=environment,
            folder=os.fspath(options["cwd"] or os.getcwd()),
            descriptors=list(descriptors),
            session=options["start_new_session"],
            umask=umask(),
        )
        self.pid = seed.fork(request, list(descriptors.values()))
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]  # as the method that is replaced here


def run(
    line: Sequence[str], *, input: str | bytes | None = None, timeout: float | None = None, **options: Any
) -> "subprocess.CompletedProcess[Any]":
    """`subprocess.run` with this `Popen`, without `check`."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(line, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(line, process.returncode, stdout, stderr)


def fork_from(seed: Seed) -> None:
    """Have what this process starts forked from its own seed: it is itself a forked program."""
    global _own
    _own = seed


def seed_of_tests() -> Seed | None:
    """Return what forks programs that have the variables of this process, where they can be forked."""
    return _seed(dict(os.environ))


def _seed(environment: dict[str, str]) -> Seed | None:
    """Return what forks programs with these variables; None where they have to be executed."""
    seed = (_own or _first()) if _forkable(environment) else None
    return seed if seed is not None and seed.usable else None


def _forkable(environment: dict[str, str]) -> bool:
    """Whether a forked program could not tell that it had other variables while modules were imported."""
    if torch.cuda.is_available():
        return False
    launched = _launched()
    names = {name for name in {*environment, *launched} if name.startswith(_READ_AT_IMPORT)} - _READ_LATER
    # what vLLM would set itself for its ranks may be lacking yet
    return all(environment.get(name, launched.get(name)) == launched.get(name, None) for name in names)


@functools.cache
def _launched() -> dict[str, str]:
    """Variables of the first seed: those of this process, and what vLLM sets on CPUs for the processes that it starts."""
    libraries = [
        str(path)
        for folder in (Path(torch.__file__).parents[1] / "torch.libs", Path(torch.__file__).parent / "lib")
        for path in folder.glob("libgomp*.so*")
    ]
    return {
        **os.environ,
        **({"LD_PRELOAD": libraries[0]} if libraries else {}),
        "NUMEXPR_MAX_THREADS": str(torch.get_num_threads()),
        "OPENBLAS_NUM_THREADS": "1",  # a thread would not be forked
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
    }


@functools.cache
def _first() -> Seed:
    """The seed that this process started."""
    ours, its = socket.socketpair()
    start = "import sys; sys.path.insert(0, sys.argv[1]); from forked_python.program import main; main(*sys.argv[1:])"
    line = [sys.executable, "-P", "-c", start, str(Path(__file__).parents[1]), str(its.fileno())]
    process = subprocess.Popen(line, env=_launched(), stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
    its.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return Seed(ours)

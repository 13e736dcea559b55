# SPDX-License-Identifier: Apache-2.0
"""Fork what `multiprocessing` would spawn."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import util
from typing import Any

from forked_python.seed import Request, Seed, umask


def fork_spawned(seed: Seed) -> None:
    """Have this process fork from its seed what it spawns, for as long as it lives."""
    spawn: Callable[[Any, Any, Any], int] = util.spawnv_passfds

    def fork(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in args]
        if not seed.usable or "--multiprocessing-fork" not in words:  # the tracker of resources is small
            return spawn(path, args, passfds)
        numbers = sorted({0, 1, 2, *map(int, passfds)})
        request = Request(
            arguments=words[words.index("-c") :],
            environment=dict(os.environ),
            folder=os.getcwd(),
            descriptors=numbers,
            group=os.getpgrp(),
            umask=umask(),
        )
        return seed.fork(request, numbers)

    util.spawnv_passfds = fork  # type: ignore[assignment]  # of the same arguments


@contextlib.contextmanager
def spawned_are_forked() -> Iterator[None]:
    """Have a test process fork what it spawns meanwhile, where `processes.Popen` would fork."""
    from forked_python.processes import seed_of_tests

    seed, spawn = seed_of_tests(), util.spawnv_passfds
    try:
        if seed is not None:
            fork_spawned(seed)
        yield
    finally:
        util.spawnv_passfds = spawn

# SPDX-License-Identifier: Apache-2.0
"""Has the ranks read a checkpoint on the server's disk: all of it as it was at the beginning, or none of it counts."""

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.allowed_dirs import AllowedPath
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.disk_checkpoint import DiskCheckpoint, DiskFile, look
from vllm_fp8ext.serve.stage_arguments import stage_arguments
from vllm_fp8ext.serve.work import outcome
from vllm_fp8ext.update.contract.operations import Operation
from vllm_fp8ext.update.contract.regular_file import settle
from vllm_fp8ext.update.contract.results import Result, UpdateState
from vllm_fp8ext.update.contract.update_errors import PROBLEMS_LISTED, listed
from vllm_fp8ext.update.transports.files.message import FileSource


async def read_checkpoint(backend: Backend, id: str, place: AllowedPath) -> UpdateState:
    """Stage a file, or those that make the checkpoint in a folder; all problems of all files in one report.

    Raises:
        UpdateError: `file-changed`: the checkpoint is not what it was at the beginning; nothing of it counts as sent.
    """
    checkpoint = await asyncio.to_thread(look, backend.allowed_dirs, place)
    await settle(checkpoint.stamps)
    outcomes = await _stage_files(backend, id, checkpoint.files)
    outcomes.append(await outcome(asyncio.to_thread(checkpoint.require_unchanged, backend.allowed_dirs)))
    errors = [result for result in outcomes if isinstance(result, UpdateError)]
    changed = next((error for error in errors if error.kind == "file-changed"), None)
    if changed:  # what is wrong besides may come of that
        await _withdraw(backend, id, checkpoint, changed)
        raise changed
    if len(errors) == 1:
        raise errors[0]
    if errors:
        problems = [
            problem for error in errors for problem in error.details.get("problems", [error.as_dict()])
        ]
        message = "; ".join(str(error) for error in errors[:PROBLEMS_LISTED])
        count = sum(error.details.get("problem_count", 1) for error in errors)
        status = max(error.status for error in errors)
        raise UpdateError("invalid-tensors", message, status=status, **listed(problems, count))
    state: UpdateState = await backend.engine(Operation.UPDATE, id=id)
    return state


async def _withdraw(backend: Backend, id: str, checkpoint: DiskCheckpoint, error: UpdateError) -> None:
    keys = [file.name for file in checkpoint.files]
    problem = {"kind": error.kind, "detail": str(error)}
    await outcome(
        backend.engine(Operation.WITHDRAW, id=id, chunks=keys, problem=problem)
    )  # it may have ended


async def _stage_files(backend: Backend, id: str, files: Sequence[DiskFile]) -> list[Any]:
    """Stage files, one after the other; ranks that end one have the next already. Returns what became of each."""

    async def ended(begun: Any) -> Any:
        if isinstance(begun, UpdateError):
            return begun
        return await outcome(backend.engine.wait_for_job(Operation.STAGE, begun))

    begun = [await outcome(_begin_file(backend, id, files[0]))]
    for index, file in enumerate(files[1:]):
        begun.append(await outcome(_begin_file(backend, id, file)))
        begun[index] = await ended(begun[index])
    return [*begun[:-1], await ended(begun[-1])]


async def _begin_file(backend: Backend, id: str, file: DiskFile) -> Result:
    """Have the ranks stage a file; returns what `engine.wait_for_job` waits for."""
    tensors = await asyncio.to_thread(file.tensors)
    source = FileSource(file.place.path, file.stamp, file.place.folder)
    arguments = stage_arguments(id, file.name, source, tensors, file.stamp.size)
    started: Result = await backend.engine(Operation.STAGE, **arguments)
    return started

# SPDX-License-Identifier: Apache-2.0
"""Reads tensors from files on disk. They are never mapped: whoever truncates a mapped file kills the process."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.regular_file import (
    NotRegularError,
    path_error,
    real_descriptor,
    stamp_of,
)
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.files.message import FileSource
from vllm_fp8ext.update.transports.gather import read_items
from vllm_fp8ext.update.transports.memory import ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import BUFFERS, READ_BYTES, READERS, Fill, ReadAhead, TensorRows
from vllm_fp8ext.update.transports.receiver import Receiver


class FileReceiver(Receiver[FileSource]):
    """Reads files ahead; for a GPU into page-locked memory, so that copies to the GPU run beside the reading."""

    @contextmanager
    def open(
        self,
        source: FileSource,
        tensors: Sequence[StoredTensor],
        as_rows: Collection[str],
        require_wanted: Callable[[], None],
    ) -> Iterator[Iterable[ResidentTensors | TensorRows]]:
        """Yield the tensors of a file (`Receiver.open`); rows are those of larger tensors in parts, of all others whole.

        Raises:
            UpdateError: `file-changed`.
        """
        try:
            descriptor = real_descriptor(source.folder, source.path)
        except OSError as error:
            raise _read_error(source, error) from None
        try:
            _require_unchanged(descriptor, source)
            schedule = self._rank.copy_schedule(tensors, as_rows)
            with closing(self._files.read(read_items(schedule), _filler(descriptor, source))) as parts:
                yield self._rank.gather.copy_groups(parts, schedule, require_wanted)
            _require_unchanged(descriptor, source)
        finally:
            os.close(descriptor)

    @cached_property
    def _files(self) -> ReadAhead:
        return ReadAhead(self._rank.device, READERS, BUFFERS, READ_BYTES)


def _filler(descriptor: int, source: FileSource) -> Fill:
    def fill(buffer: memoryview, start: int) -> None:
        position = start
        while buffer:
            try:
                count = os.preadv(descriptor, [buffer], position)
            except OSError as error:
                raise _read_error(source, error) from None
            if not count:
                raise _changed(source)
            buffer, position = buffer[count:], position + count

    return fill


def _require_unchanged(descriptor: int, source: FileSource) -> None:
    if stamp_of(os.fstat(descriptor)) != source.stamp:
        raise _changed(source)


def _read_error(source: FileSource, error: OSError) -> UpdateError:
    """Return the error for a file that can't be read any more.

    It could be opened when its stamp was taken: what is missing now, or no file, was changed since.
    """
    refusal = path_error(source.path, error)
    if isinstance(error, NotRegularError) or refusal.kind in ("not-found", "file-changed"):
        return _changed(source)
    return refusal


def _changed(source: FileSource) -> UpdateError:
    return UpdateError("file-changed", f"{source.path} was changed while it was read", status=409)

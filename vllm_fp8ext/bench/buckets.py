# SPDX-License-Identifier: Apache-2.0
"""A trainer's tensors as parts of a few large buffers, as trainers with flat parameters hold them: a server opens one handle
for each buffer, where tensors by themselves are hundreds."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

BUCKET_BYTES = 1 << 30
_UNIT = 256
"""Where a tensor begins: what torch's allocator gives, too."""


def in_buckets(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, one by one, copied into buffers of `bucket_bytes` on their device; a larger one has a buffer of its
    own."""
    bucket, used = torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in tensors:
        room = -(-tensor.nbytes // _UNIT) * _UNIT
        if used + room > bucket.numel() or bucket.device != tensor.device:
            bucket, used = torch.empty(max(bucket_bytes, room), dtype=torch.uint8, device=tensor.device), 0
        place = bucket[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, place.copy_(tensor)
        used += room

# SPDX-License-Identifier: Apache-2.0
"""Other names under which tensors of a model may come, and output layers that are served as the embedding."""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.update.contract.manifest import Manifest, ShardSlice, TensorSpec
from vllm_fp8ext.update.worker.reachable_tensors import identity_of

_NUMBER = re.compile(r"\d+")

Trace = Callable[[Iterable[TensorSpec]], Mapping[str, tuple[ShardSlice, ...]]]


@dataclass(frozen=True, slots=True)
class OtherName:
    """Another name of the tensor that the manifest calls `name`. `sure`: it is one even where the model's loader does not
    know it."""

    other: str
    name: str
    sure: bool


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a model's names say, beside its loader.

    `heads`: by the path of an embedding's weight that serves as output layer too, names that a checkpoint may have for that
    layer, the most usual first. `others`: other names that tensors of a manifest may have, which was made of these.
    """

    heads: Mapping[str, Sequence[str]] = field(default_factory=dict)
    others: Callable[[Manifest, Sequence[TensorSpec]], Iterable[OtherName]] = lambda manifest, specs: ()

    def tied(
        self, written: Mapping[str, Sequence[Tensor | None]], tensors: Mapping[str, Tensor]
    ) -> dict[str, str]:
        """By the name of each output layer that is served as an embedding, the embedding's. `written`: by the name of each
        tensor of the checkpoint, what it is loaded into; `tensors`: by path, those of the model."""
        found = {}
        for path, heads in self.heads.items():
            place = identity_of(tensors[path])
            embeddings = [
                name
                for name, targets in written.items()
                if name not in heads
                and any(target is not None and identity_of(target) == place for target in targets)
            ]
            if embeddings:
                head = next((name for name in heads if name in written), heads[0])
                found[head] = embeddings[-1]
        return found


def aliases_of(candidates: Iterable[OtherName], manifest: Manifest, trace: Trace) -> dict[str, str]:
    """List by name what comes under it as well: where the loader puts it into the same places, or takes nothing under it and
    it is sure. One name of each kind, all layers and experts alike, is tried."""
    agreed: dict[tuple[str, str], bool] = {}
    found = {}
    for candidate in candidates:
        other, name = candidate.other, candidate.name
        if (
            other in manifest.tensors
            or other in manifest.tied
            or other in manifest.fused
            or manifest.ignores(other)
        ):
            continue
        kind = _NUMBER.sub("#", other), _NUMBER.sub("#", name)
        if kind not in agreed:
            parts: tuple[ShardSlice, ...] = ()
            if name in manifest.tensors:
                with contextlib.suppress(ConfigError):
                    parts = trace([replace(manifest.tensors[name], name=other)])[other]
            agreed[kind] = parts == manifest.pieces[name] if parts else candidate.sure
        if agreed[kind]:
            found[other] = name
    return found

# SPDX-License-Identifier: Apache-2.0
"""Other names of tensors, and output layers that are served as the embedding."""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.worker.reachable_tensors import identity_of

_NUMBER = re.compile(r"\d+")

Trace = Callable[[Iterable[TensorSpec]], Mapping[str, tuple[ShardSlice, ...]]]


@dataclass(frozen=True, slots=True)
class AliasCandidate:
    """Another name, `other`, of the tensor that the manifest calls `name`."""

    other: str
    name: str
    sure: bool
    """True if it is one even where the model's loader does not know it."""


@dataclass(frozen=True, kw_only=True)
class ModelNames:
    """Names that a model's tensors have beside those that its loader takes."""

    heads: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of an output layer in checkpoints, by the path of the embedding; the most usual first."""
    aliases: Callable[[Manifest, Sequence[TensorSpec]], Iterable[AliasCandidate]] = lambda manifest, specs: ()
    """Returns other names that tensors of a manifest, which was made of these, may have."""

    def tied(
        self, written: Mapping[str, Sequence[Tensor | None]], tensors: Mapping[str, Tensor]
    ) -> dict[str, str]:
        """Return the embedding's name, by each output layer that is served as it.

        `written`: by the name of each tensor of the checkpoint, what it is loaded into; `tensors`: by path, those of the
        model.
        """
        tied = {}
        for path, heads in self.heads.items():
            embedding = identity_of(tensors[path])
            embeddings = [
                name
                for name, targets in written.items()
                if name not in heads
                and any(target is not None and identity_of(target) == embedding for target in targets)
            ]
            if embeddings:
                head = next((name for name in heads if name in written), heads[0])
                tied[head] = embeddings[-1]
        return tied


def aliases_of(candidates: Iterable[AliasCandidate], manifest: Manifest, trace: Trace) -> dict[str, str]:
    """Return those candidates that are aliases: the manifest's name by the other name.

    A candidate is one if the loader puts both names into the same places, or takes nothing under it and it is sure. One name
    of each kind, all layers and experts alike, is tried.
    """
    agreed: dict[tuple[str, str], bool] = {}
    aliases = {}
    # what this rank does not serve comes last: it could not be tried
    for candidate in sorted(candidates, key=lambda candidate: candidate.name in manifest.ignored):
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
            aliases[other] = name
    return aliases

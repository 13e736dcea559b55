# SPDX-License-Identifier: Apache-2.0
"""Real ranks around a model whose queries, keys and values are simple numbers, and the engine core that they answer to."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.config import Settings
from vllm_fp8ext.kernels.attention.kv_amax import AmaxCounts
from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.kv_types import HeadShare
from vllm_fp8ext.update.contract.kv_tokens import choose
from vllm_fp8ext.update.worker.kv_buffers import KvScaleBuffers
from vllm_fp8ext.update.worker.kv_scales import RankKv
from vllm_fp8ext.update.worker.rank import Rank

from .layers import CPU, layers

NAMES = ("a", "b")
HEADS, SIZE = 2, 4
VOCABULARY, LONGEST = 64, 40


class Model:
    """Q, K and V of each layer are the token ids, times a number of this rank: `factors[layer, kind]`. They alternate in
    sign, so that nothing but magnitudes counts."""

    def __init__(self, heads: int = HEADS) -> None:
        self.factors: dict[tuple[str, str], float] = {}
        self.heads = heads
        self.calls = 0
        self.see: Callable[[str, Tensor, Tensor, Tensor], None]
        self.after: Callable[[], None]

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.calls += 1
        assert positions.shape == input_ids.shape
        signs = 1 - 2 * (torch.arange(self.heads * SIZE) % 2)
        for name in NAMES:
            q, k, v = (
                (input_ids[:, None] * signs * self.factors.get((name, kind), 1.0)).bfloat16()
                for kind in "qkv"
            )
            self.see(name, *(part.view(-1, self.heads, SIZE) for part in (q, k, v)))
            self.after()
        return input_ids


def attend(model: Any, after: Any, see: Any = None, lengths: Sequence[int] | None = None) -> None:
    model.after, model.see = after, see


class Recorder:
    """Tells what a test wrote into it, once."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.amax = 0.0
        self.saturated = 0

    def take(self) -> dict[str, AmaxCounts]:
        amax = torch.full((3, self.heads), self.amax)
        saturated = torch.full((3, self.heads), self.saturated)
        self.amax, self.saturated = 0.0, 0
        return {name: AmaxCounts(amax, saturated, torch.full((3,), 8)) for name in NAMES}


class Core:
    """The engine core of `KvEngine`. `rescaled`: what ranks were told of cached blocks; `problem`: what stops them."""

    def __init__(self, policy: str, *, ranks: int = 1, per_head: bool = False, **more: Any) -> None:
        chosen = {"policy": policy, "tokens": 64, **more, **({"granularity": "head"} if per_head else {})}
        self.settings = Settings.parse({"fp8ext": {"kv_scales": chosen}})
        assert self.settings.kv_scales is not None
        self.kv_cache_dtype = "fp8"
        self.vocabulary, self.longest_prompt = VOCABULARY, LONGEST
        self.recent: list[list[int]] = []
        self.blocks: list[Any] = [[3, 4]]
        self.rescaled: list[Any] = []
        self.problem: Exception | None = None
        self.called: list[str] = []
        self.fleet = [self._rank(number, ranks, self.settings.kv_scales, per_head) for number in range(ranks)]

    def _rank(self, number: int, world_size: int, settings: KvScaleSettings, per_head: bool) -> Rank:
        share = HeadShare.of(number, world_size, HEADS)
        here = layers(*NAMES, heads=share.count if per_head else 0)
        scales = KvScaleBuffers(here, dict.fromkeys(NAMES, share) if per_head else {}, device=CPU)
        recorder = Recorder(share.count) if settings.policy == "history" else None
        cache: Any = SimpleNamespace(
            rescale=self._rescale, warm_up=lambda: self.called.append("cache.warm_up")
        )
        kv = RankKv(scales, settings, cache, recorder)
        weight_swap = SimpleNamespace(pairs=[(torch.zeros(1), torch.zeros(1))], broken=False, inplace=False)
        weight_swap.fingerprint = lambda **_: 1
        stager = SimpleNamespace(tied={})
        shadow: Any = SimpleNamespace(
            model=Model(share.count),
            weight_swap=weight_swap,
            stager=stager,
            swap=lambda: None,
            derive=lambda: None,
            layers=here,
        )
        return Rank(shadow, number, world_size, 0, attend, kv)

    def begin(self) -> None:
        """What a worker does at start."""
        settings = self.settings.kv_scales
        assert settings is not None
        tokens = choose(None, settings, [], VOCABULARY, LONGEST)
        amax = [
            self._kv(rank).observation(rank.shadow.model, CPU, attend, tokens.prompts) for rank in self.fleet
        ]
        answers: list[list[Any]] = [
            [self._kv(rank).scales.served() for rank in self.fleet],
            [work(lambda: None).amax for work in amax],
        ]
        for rank in self.fleet:
            turn = iter(answers)
            self._kv(rank).begin(rank.shadow.model, CPU, attend, tokens, lambda _, turn=turn: next(turn))

    def _rescale(self, ratios: Any, blocks: Any) -> dict[str, int]:
        if self.problem is not None:
            raise self.problem
        self.rescaled.append((ratios, blocks))
        return {"codes": 10, "saturated": 2, "flushed": 1}

    @staticmethod
    def _kv(rank: Rank) -> RankKv:
        assert rank.kv is not None
        return rank.kv

    def ranks(self, method: str, *args: Any) -> list[Any]:
        self.called.append(method)
        return [attrgetter(method)(rank)(*args) for rank in self.fleet]

    def recent_tokens(self) -> list[list[int]]:
        return self.recent

    def draft_acceptance(self) -> None:
        return None

    def held_blocks(self) -> list[Any]:
        return self.blocks

    def record(self, amax: float) -> None:
        """Something was written into every rank's cache."""
        for rank in self.fleet:
            recorder: Any = self._kv(rank).recorder
            recorder.amax = max(recorder.amax, amax)

    def factor(self, layer: str, kind: str, value: float, rank: int = 0) -> None:
        """Make K, V or Q of a layer so many times the token ids from now on."""
        model: Any = self.fleet[rank].shadow.model
        model.factors[layer, kind] = value

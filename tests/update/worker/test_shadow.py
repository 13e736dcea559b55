# SPDX-License-Identifier: Apache-2.0
"""Small models with buffers that are loaded, and with an output layer that is the embedding, updated through a real rank."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_fp8ext.errors import ConfigError, Failure
from vllm_fp8ext.update.contract.canary import CanarySpec
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.rank_results import Accepted, RankProgress
from vllm_fp8ext.update.contract.regular_file import stamp_of
from vllm_fp8ext.update.contract.safetensors_header import file_tensors
from vllm_fp8ext.update.engine.session import Running, Session
from vllm_fp8ext.update.engine.timestamp import Moment
from vllm_fp8ext.update.worker.alias_names import AliasCandidate, ModelNames
from vllm_fp8ext.update.worker.digest import checkpoint_digests
from vllm_fp8ext.update.worker.rank import Rank
from vllm_fp8ext.update.worker.shadow import Shadow

VOCABULARY, WIDTH = 40, 16
EMBED, HEAD = "embed.weight", "lm_head.weight"


class Model(nn.Module):
    """One tied to its embedding, with a loader such as vLLM's have: it skips the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("scalar", torch.ones(1, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.ones(3), persistent=False)
        self.gain = torch.ones(WIDTH)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        places = {EMBED: self.embed.weight, "scalar": self.scalar, "steps": self.steps, "gain": self.gain}
        for name, weight in weights:
            if name != HEAD:
                places[name.removeprefix("model.")].data.copy_(weight)


def checkpoint(seed: int, **changes: Tensor) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {
        EMBED: torch.randn(VOCABULARY, WIDTH, generator=noise).bfloat16(),
        "scalar": torch.tensor([0.5 + seed]).bfloat16(),
        "steps": torch.tensor(7 + seed),
        "gain": torch.randn(WIDTH, generator=noise),
        **{name.replace("__", "."): tensor for name, tensor in changes.items()},
    }


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]


class Served:
    """A model that was loaded from a checkpoint, its rank, and the updates of it."""

    def __init__(
        self, tensors: dict[str, Tensor], folder: Path, *, inplace: bool = False, tied: bool = False
    ) -> None:
        self.live, shadow = Model(), Model()
        self.live.load_weights(tensors.items())
        with torch.no_grad():
            shadow.embed.weight.fill_(torch.nan)
        names = ModelNames(
            heads={EMBED: ["other_head.weight", HEAD]} if tied else {},
            aliases=lambda manifest, _: [
                AliasCandidate(f"model.{name}", name, False) for name in manifest.tensors
            ],
        )
        self.rank = Rank(
            Shadow(self.live, shadow, specs_of(tensors), 0, names, inplace=inplace), 0, 1, 0, lambda *_: None
        )
        self.manifest: Manifest = self.rank.shadow.manifest
        self._folder = folder
        self._jobs = 0
        self.inplace = inplace

    def opened(self, *, partial: bool = False) -> Session:
        canary = CanarySpec([[1]], built_in=True)
        more = {"partial": partial, "inplace": self.inplace}
        return Session(f"u{self._jobs}", "v", Running.KEEP, self.manifest, Moment.now(), 1e6, canary, **more)

    def send(self, session: Session, key: str, tensors: dict[str, Tensor]) -> list[tuple[str, str]]:
        """What is wrong with a chunk, as kinds and tensors."""
        file = self._folder / f"{session.id}-{key}-{self._jobs}.safetensors"
        save_file(tensors, file)
        stored = file_tensors(file)
        session.receive(key, [tensor.spec for tensor in stored], file.stat().st_size)
        told = {"transport": "files", "path": str(file), "stamp": list(stamp_of(file.stat())), "folder": "/"}
        listed = [[t.spec.name, list(t.spec.shape), t.spec.dtype, t.start, t.size] for t in stored]
        result = self._done("stage", session.id, told, listed, {}, 0.0, session.tied_in_others(key))
        session.staged(key, result.problems)
        return [(problem["kind"], problem["tensor"]) for problem in result.problems]

    def commit(self, session: Session) -> Failure | None:
        """The answer of the rank that finished the rest, where something is wrong with it; else the weights are served."""
        session.check(0)
        if session.partial:
            result = self._done("copy_unsent", session.id, sorted(session.staged_names()))
            if isinstance(result, Failure):
                return result
        assert self.rank.swap() == Accepted()
        return None

    def digests(self) -> dict[str, str]:
        return dict(self._done("digests").digests)

    def _done(self, method: str, *arguments: Any) -> Any:
        self._jobs += 1
        assert getattr(self.rank, method)(self._jobs, *arguments) == Accepted()
        while isinstance(result := self.rank.poll(self._jobs, 0.05), RankProgress):
            pass
        return result


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Served]:
    return lambda tensors, **options: Served(tensors, tmp_path, **options)


@pytest.fixture(params=[False, True], ids=["shadow", "in place"])
def inplace(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_whatever_a_loader_writes_is_exchanged_and_digested(
    serve: Callable[..., Served], inplace: bool, tmp_path: Path
) -> None:
    """Parameters, buffers, integers, and tensors that are neither."""
    early, late = checkpoint(0), checkpoint(1)
    served = serve(early, inplace=inplace)
    cold = served.digests()
    assert cold.keys() == early.keys()
    session = served.opened()
    assert served.send(session, "0", late) == []
    assert served.commit(session) is None
    live = served.live
    result = {EMBED: live.embed.weight, "scalar": live.scalar, "steps": live.steps, "gain": live.gain}
    assert all(torch.equal(result[name], late[name]) for name in late)
    folder = tmp_path / "late"
    folder.mkdir()
    save_file(late, folder / "model.safetensors")
    again = Manifest.from_dict(json.loads(json.dumps(served.manifest.as_dict())))
    digests = checkpoint_digests(folder, again)
    assert served.digests() == {name: ranks["0"] for name, ranks in digests.items()}
    assert not set(served.digests().values()) & set(cold.values())


def test_a_buffer_must_come_and_be_finite(serve: Callable[..., Served]) -> None:
    served = serve(checkpoint(0))
    session = served.opened()
    late = checkpoint(1)
    scalar = late.pop("scalar")
    assert served.send(session, "0", late) == []
    assert session.missing() == {"scalar"}
    assert served.send(session, "1", {"scalar": scalar * torch.nan}) == [("non-finite", "scalar")]


def test_integers_come_as_they_are(serve: Callable[..., Served]) -> None:
    manifest = serve(checkpoint(0)).manifest
    assert manifest.dtypes_of("steps") == ["int64"]
    assert "int64" in manifest.as_dict()["dtypes"]
    (problem,) = manifest.problems([TensorSpec("steps", (), "bfloat16")])
    assert problem["kind"] == "wrong-dtype"
    (problem,) = manifest.problems([TensorSpec("gain", (WIDTH,), "int64")])
    assert problem["kind"] == "wrong-dtype"


def test_a_loader_that_puts_another_tensor_in_place_is_refused() -> None:
    class Replacing(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, weight in weights:
                if name == "scalar":
                    self.scalar = weight
                else:
                    super().load_weights([(name, weight)])

    tensors = checkpoint(0)
    with pytest.raises(ConfigError, match="scalar: the model's loader puts another tensor in its place"):
        Shadow(Replacing(), Replacing(), specs_of(tensors), 0)


def test_a_tensor_that_live_and_shadow_share_cannot_be_loaded() -> None:
    live, shadow = Model(), Model()
    shadow.gain = live.gain
    with pytest.raises(
        ConfigError, match="gain: loaded from the checkpoint, though live and shadow share it"
    ):
        Shadow(live, shadow, specs_of(checkpoint(0)), 0)


def test_parts_of_one_storage_are_exchanged_once_and_whole(serve: Callable[..., Served]) -> None:
    live, shadow = Model(), Model()
    for model in (live, shadow):
        model.a_part = model.gain[:4]
    made = Shadow(live, shadow, specs_of(checkpoint(0)), 0)
    assert sorted(pair[0].numel() for pair in made.weight_swap.pairs) == sorted(
        tensor.nbytes for tensor in checkpoint(0).values()
    )
    for model in (live, shadow):
        both = torch.zeros(2 * WIDTH)
        model.gain, model.a_part = both[:WIDTH], both[WIDTH - 4 :]
    with pytest.raises(ConfigError, match="expected a part of a_part, whose storage it shares"):
        Shadow(live, shadow, specs_of(checkpoint(0)), 0)


def test_weights_beside_the_model_survive_the_loss_of_memory() -> None:
    """No update brings a draft model's weights, nor adapters. What is the model's own is saved once."""
    live, draft = Model(), torch.nn.Linear(2, 2)
    made = Shadow(live, Model(), specs_of(checkpoint(0)), 0, beside=[draft, live])
    expected = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with torch.no_grad():
        made.save_constants()
        assert len(made._kept) == len(expected)
        for tensor in draft.parameters():
            tensor.zero_()
        made.restore()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in draft.state_dict().items())


def test_an_alias_is_what_the_loader_puts_into_the_same_place(serve: Callable[..., Served]) -> None:
    manifest = serve(checkpoint(0)).manifest
    assert manifest.aliases == {f"model.{name}": name for name in checkpoint(0)}
    assert manifest.canonical("model.scalar") == manifest.canonical("scalar") == "scalar"
    assert manifest.canonical("model.scalar_scale_inv") == "scalar_scale_inv"
    assert manifest.canonical("model.strange") == "model.strange"


TIED = {
    "the embedding first": ([EMBED], [HEAD]),
    "the output layer first": ([HEAD], [EMBED]),
    "both in one chunk": ([HEAD, EMBED],),
}


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("order", TIED)
def test_an_output_layer_that_is_the_embedding_is_compared(
    serve: Callable[..., Served], inplace: bool, order: str, equal: bool
) -> None:
    served = serve(checkpoint(0), tied=True, inplace=inplace)
    assert served.manifest.tied == {"other_head.weight": EMBED}
    served = serve(checkpoint(0, lm_head__weight=checkpoint(0)[EMBED]), tied=True, inplace=inplace)
    assert (served.manifest.tied, served.manifest.ignored) == ({HEAD: EMBED}, set())
    assert isinstance(served.manifest.ignored, frozenset)
    cold = served.digests()
    assert HEAD not in cold
    late = checkpoint(1)
    late[HEAD] = late[EMBED].float() if equal else late[EMBED].clone()
    if not equal:
        late[HEAD][-1, -1] = 3.0
    session = served.opened()
    *first, last = TIED[order]
    rest = {name: late[name] for name in late if name not in (EMBED, HEAD)}
    for number, names in enumerate(first):
        assert served.send(session, f"first {number}", {name: late[name] for name in names}) == []
    problems = served.send(session, "last", {name: late[name] for name in last})
    assert served.send(session, "rest", rest) == []
    if equal:
        assert problems == []
        assert served.commit(session) is None
        assert torch.equal(served.live.embed.weight, late[EMBED])
        return
    assert [kind for kind, _ in problems] == ["tied-differs"]
    assert session.missing() == set(last)
    if not inplace:
        assert served.digests() == cold
    # what was refused comes again, equal
    kept = late[first[0][0]] if first else late[EMBED]
    assert served.send(session, "last", {name: kept.clone() for name in last}) == []
    assert served.commit(session) is None
    assert torch.equal(served.live.embed.weight, kept)


def test_an_output_layer_of_another_shape_is_refused(serve: Callable[..., Served]) -> None:
    manifest = serve(checkpoint(0), tied=True).manifest
    (problem,) = manifest.problems([TensorSpec("other_head.weight", (7, WIDTH), "bfloat16")])
    assert problem["kind"] == "wrong-shape"
    assert problem["expected"] == [VOCABULARY, WIDTH]


def test_a_checkpoint_whose_output_layer_is_another_one_does_not_start(
    serve: Callable[..., Served], inplace: bool
) -> None:
    early = checkpoint(0)
    served = serve({**early, HEAD: early[EMBED]}, tied=True, inplace=inplace)
    served.rank.shadow.require_equal({HEAD: early[EMBED].float()})
    for other in (early[EMBED][:7], -early[EMBED]):
        with pytest.raises(ConfigError, match=f"{HEAD}: differs from {EMBED}"):
            served.rank.shadow.require_equal({HEAD: other})


@pytest.mark.parametrize("equal", [True, False])
def test_an_output_layer_alone_is_compared_with_what_is_served(
    serve: Callable[..., Served], equal: bool
) -> None:
    early = checkpoint(0)
    served = serve({**early, HEAD: early[EMBED]}, tied=True)
    cold = served.digests()
    session = served.opened(partial=True)
    sent = early[EMBED] if equal else checkpoint(1)[EMBED]
    assert served.send(session, "0", {HEAD: sent}) == []
    error = served.commit(session)
    if equal:
        assert error is None
    else:
        assert error is not None
        assert (error.kind, error.details["problems"][0]["tensor"]) == ("tied-differs", HEAD)
        assert served.send(session, "1", {EMBED: sent}) == []
        assert served.commit(session) is None
        assert torch.equal(served.live.embed.weight, sent)
    assert (served.digests() == cold) == equal


def test_in_place_an_output_layer_alone_asks_for_the_embedding(serve: Callable[..., Served]) -> None:
    """It has overwritten what is served."""
    early = checkpoint(0)
    served = serve({**early, HEAD: early[EMBED]}, tied=True, inplace=True)
    session = served.opened(partial=True)
    assert served.send(session, "0", {HEAD: checkpoint(1)[EMBED]}) == []
    assert session.missing() == {EMBED}


def test_an_output_layer_whose_chunk_was_refused_counts_as_not_sent(serve: Callable[..., Served]) -> None:
    early, late = checkpoint(0), checkpoint(1)
    served = serve({**early, HEAD: early[EMBED]}, tied=True)
    session = served.opened()
    bad = {HEAD: early[EMBED], "gain": late["gain"] * torch.inf}
    assert served.send(session, "0", bad) == [("non-finite", "gain")]
    assert served.send(session, "1", {EMBED: late[EMBED]}) == []
    assert served.send(session, "0", {HEAD: late[EMBED], "gain": late["gain"]}) == []
    twice = {HEAD: late[EMBED]}
    with pytest.raises(Exception, match="duplicate-tensor"):
        served.send(session, "2", twice)

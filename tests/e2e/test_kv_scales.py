# SPDX-License-Identifier: Apache-2.0
"""An FP8 KV cache whose scales change with the weights."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_fp8ext.checkpoints import EARLY, LATE, problems
from vllm_fp8ext.demo.server import SMALL, Server
from vllm_fp8ext.demo.traffic import accuracy, answers
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.attention.kv_cache import amax_by_head, next_scales
from vllm_fp8ext.kv_types import scale_digests
from vllm_fp8ext.serve.schema import KvScales, KvScalesServed, LayerScales

from .ask import ATTEMPTS, Stream, complete, metrics, state
from .conftest import TWO_RANKS, answering
from .plugins import variables

pytestmark = pytest.mark.fp8_kv

PROMPTS = [[5 + 7 * (i + 40 * n) % 110 for i in range(100)] for n in range(3)]
"""Three prompts of token ids; their tokens stand one after the other in the pass that calibrates."""
UNDECIDED = 0.125
"""Logits between two tokens of which either may come when small codes are rounded twice: the bits that they lose."""
FP8_WEIGHTS = 0.15
"""How far the largest K or V of blockwise FP8 may be from BF16's: a few layers at about 4 % each."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """One rank with powers of two, prompts of its own and linear layers in FP8; two ranks with exact scales, no margin and
    linear layers in BF16. Each is started when it is first asked for."""
    logs = tmp_path_factory.mktemp("logs")
    options = (*SMALL, "--kv-cache-dtype", "fp8")
    given: dict[str, dict[str, Any]] = {
        "pow2": {
            "arguments": options,
            "settings": {
                "kv_scales": {"policy": "calibrate", "prompts": PROMPTS},
                "allowed_dirs": [str(LATE.parent)],
            },
        },
        "fp32": {
            "arguments": (*options, *TWO_RANKS),
            "settings": {
                "ignore": ["*"],
                "kv_scales": {"policy": "provided", "scale_format": "fp32", "margin": 0.0},
            },
            "variables": variables(logs, ranks=2),
        },
    }

    @functools.cache
    def running(name: str) -> Server:
        server = Server(EARLY, logs / f"{name}.log", **given[name])
        stack.enter_context(answering(server))
        return server

    with ExitStack() as stack:
        yield running


@pytest.fixture
def pow2(servers: Callable[[str], Server]) -> Server:
    return on_early(servers("pow2"))


@pytest.fixture
def fp32(servers: Callable[[str], Server]) -> Server:
    return servers("fp32")


def on_early(server: Server) -> Server:
    with server.client() as client:
        weights = client.weights()
        if weights.update:
            client.abandon(weights.update)
        if weights.epoch and (
            weights.version != "early" or weights.kv_scales is None or weights.kv_scales.source != "settings"
        ):
            client.push(EARLY, version="early")
    return server


def served(server: Server) -> KvScalesServed:
    with server.client() as client:
        return client.kv_scales()


def expected(checkpoint: Path, prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Largest K (after rotary embedding) and V of a checkpoint in BF16, by layer, from transformers' own KV cache."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    collected: dict[str, dict[str, float]] = {}
    for prompt in prompts:
        with torch.inference_mode():
            cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
        for number, layer in enumerate(cache.layers):
            here = collected.setdefault(f"model.layers.{number}.self_attn.attn", {"k": 0.0, "v": 0.0})
            for kind, values_BGTD in (("k", layer.keys), ("v", layer.values)):
                amax = float(amax_by_head(values_BGTD[0].transpose(0, 1), 1))
                here[kind] = max(here[kind], amax)
    return collected


def require_scales(served_scales: KvScalesServed, checkpoint: Path) -> None:
    """Power-of-two scales with the default margin, as a trainer computes them from its own K and V: the same, unless amax is
    close to where the power changes."""
    for layer, kinds in expected(checkpoint, PROMPTS).items():
        for kind, amax in kinds.items():
            low, high = (
                next_scales(torch.tensor([amax * (1 + sign * FP8_WEIGHTS)]), torch.ones(1)).item()
                for sign in (-1, 1)
            )
            [scale] = served_scales.scales[layer][kind]
            assert low <= scale <= high, (layer, kind, amax)


def test_scales_fit_the_weights_at_start_and_after_an_update(pow2: Server):
    early = served(pow2)
    assert (early.policy, early.source, early.tokens, early.granularity) == (
        "calibrate",
        "settings",
        300,
        "layer",
    )
    assert (
        early.scales.keys() == {f"model.layers.{n}.self_attn.attn" for n in range(3)} == early.layers.keys()
    )
    require_scales(early, EARLY)
    with pow2.client() as client:
        update = client.push(LATE, version="late")
        assert update.kv_scales is not None
        assert update.seconds["kv_scales"] <= update.seconds["prepare"]
        weights = client.weights()
    late = served(pow2)
    require_scales(late, LATE)
    assert late.scales != early.scales
    assert weights.kv_scales is not None
    assert (late.epoch, late.age, weights.kv_scales.epoch) == (weights.epoch, 0, weights.epoch)
    assert (late.source, late.tokens, late.fit) == (
        "settings",
        300,
        update.kv_scales.fit,
    )
    for layer in late.layers.values():
        for fit in layer.values():
            assert (fit.saturated_fraction, fit.headroom >= 1.0) == (0.0, True)
            assert 0.01 < fit.relative_error < 2.0**-4


def test_the_model_answers_as_well_as_ever(pow2: Server):
    with pow2.client() as client:
        client.push(LATE, version="late")
    asked = problems(40)
    assert accuracy(answers(pow2.url, asked), asked) > 0.9


def test_scales_are_in_digests_and_come_back_with_their_weights(pow2: Server):
    with pow2.client() as client:
        before, scales = state(pow2), served(pow2).scales
        assert before["digests"]["kv_scales"] == scale_digests(scales)
        client.push(LATE, version="late")
        assert client.verify().epoch == before["epoch"] + 1
        late = client.digests()
        assert late.kv_scales == scale_digests(served(pow2).scales) != before["digests"]["kv_scales"]
        client.rollback()
        client.verify()
        assert served(pow2).scales == scales
        assert served(pow2).age == 2
        again = state(pow2)
        assert again["outputs"] == before["outputs"]
        assert again["digests"]["kv_scales"] == before["digests"]["kv_scales"]
        client.rollback()
        client.verify()
        assert client.digests().kv_scales == late.kv_scales
        client.push(EARLY, version="early")
        assert served(pow2).scales == scales, "the same tokens give the same scales"
        assert state(pow2)["outputs"] == before["outputs"]


def test_an_update_that_is_given_up_changes_nothing(pow2: Server):
    before = state(pow2), served(pow2)
    with pow2.client() as client:
        update = client.open(version="late", kv_scales=KvScales(prompts=[[9] * 50]))
        client.put_chunk(update.id, 0, (LATE / "model.safetensors").read_bytes())
        prepared = client.prepare(update.id)
        assert prepared.kv_scales is not None
        assert (prepared.kv_scales.source, prepared.kv_scales.tokens) == ("update", 50)
        assert (state(pow2), served(pow2)) == before
        client.abandon(update.id)
        client.verify()
    assert (state(pow2), served(pow2)) == before


def test_an_update_may_choose_for_itself(pow2: Server):
    early = served(pow2)
    ours = {layer: LayerScales(k=0.5, v=[0.1], q=None) for layer in early.scales}
    with pow2.client() as client:
        client.push(LATE, version="late", kv_scales=KvScales(policy="provided", scales=ours))
        client.verify()
        served_scales = served(pow2)
        assert (served_scales.policy, served_scales.source) == ("provided", "trainer")
        for layer, kinds in served_scales.scales.items():
            assert kinds == {
                "q": early.scales[layer]["q"],
                "k": [0.5],
                "v": [pytest.approx(0.1, rel=1e-7)],
            }
        client.push(EARLY, version="kept", kv_scales=KvScales(policy="static"))
        client.verify()
        kept = served(pow2)
        assert (kept.scales, kept.policy, kept.age) == (served_scales.scales, "provided", 1)
        client.load(str(LATE), version="loaded", kv_scales=KvScales(policy="static"))
        assert (served(pow2).scales, served(pow2).age) == (served_scales.scales, 2)
        client.push(LATE, version="own", kv_scales=KvScales(prompts=[[9] * 50]))
        assert (served(pow2).source, served(pow2).tokens) == ("update", 50)


def test_a_partial_update_is_calibrated_with_all_its_weights(pow2: Server):
    """A layer's K is four times as large once the weight of its norm is: to the bit, in powers of two."""
    name = "model.layers.1.self_attn.k_norm.weight"
    before = served(pow2).scales
    larger = {name: load_file(EARLY / "model.safetensors")[name] * 4}
    with pow2.client() as client:
        client.push(larger, version="larger", partial=True, base_epoch=client.weights().epoch)
    after = served(pow2).scales
    here = "model.layers.1.self_attn.attn"
    assert after[here] == {**before[here], "k": [before[here]["k"][0] * 4]}
    assert after["model.layers.0.self_attn.attn"] == before["model.layers.0.self_attn.attn"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (KvScales(policy="history"), "nothing is recorded"),
        (KvScales(policy="provided"), "go together"),
        (KvScales(prompts=[[128]]), "expected token ids below 128, found 128"),
        (KvScales(policy="provided", scales={"x": LayerScales(k=1.0, v=1.0)}), "unknown layers ['x']"),
    ],
)
def test_what_can_not_be_done_is_refused_on_opening(pow2: Server, asked: KvScales, message: str):
    with pow2.client() as client, pytest.raises(UpdateError) as refused:
        client.open(kv_scales=asked)
    assert (refused.value.kind, refused.value.status) == ("invalid-request", 422)
    assert message in str(refused.value)
    with pow2.client() as client:
        assert client.weights().update is None


def test_running_requests_keep_their_sense(pow2: Server):
    """What they have cached is rewritten for new scales: with the same weights they go on as if nothing had happened."""
    for _ in range(ATTEMPTS):
        on_early(pow2)
        scales = {
            layer: {kind: [4 * value for value in values] for kind, values in kinds.items()}
            for layer, kinds in served(pow2).scales.items()
        }
        with pow2.client() as client:
            wanted = KvScales.model_validate({"policy": "provided", "scales": scales})
            update = client.open(version="wide", running="keep", kv_scales=wanted)
            client.put_chunk(update.id, 0, (EARLY / "model.safetensors").read_bytes())
            client.prepare(update.id)
            stream = Stream(pow2, "123+456=", tokens=600)
            client.commit(update.id)
        stream.wait()
        if not stream.came_too_early:
            break
    assert (stream.finish, len(stream.token_ids)) == ("length", 600)
    now = served(pow2)
    assert now.scales == scales
    assert now.rescaled is not None
    assert now.rescaled.codes > now.rescaled.saturated == 0
    switch = stream.weight_versions[1]["start"]
    on_early(pow2)
    answer = complete(pow2, "123+456=", switch + 48, ignore_eos=True, logprobs=2)["choices"][0]
    alone = answer["token_ids"]
    alike = [a == b for a, b in zip(alone, stream.token_ids, strict=False)]
    if sum(alike) < len(alone) - 8:  # one token that is another makes the rest others
        *_, second, best = sorted(answer["logprobs"]["top_logprobs"][alike.index(False)].values())
        assert best - second < UNDECIDED, (switch, alone, stream.token_ids[: len(alone)])


def test_metrics_have_the_worst_and_every_layer(pow2: Server):
    samples = metrics(pow2, "fp8ext:kv_headroom")
    assert samples.keys() == {
        f'kind="{kind}",layer="{layer}"' for kind in "kv" for layer in (*served(pow2).layers, "worst")
    }
    worst = {kind: samples[f'kind="{kind}",layer="worst"'] for kind in "kv"}
    assert all(
        value >= worst[kind] >= 1.0
        for label, value in samples.items()
        for kind in "kv"
        if f'kind="{kind}"' in label
    )
    assert metrics(pow2, "fp8ext:kv_scales_age_epochs") == {"": served(pow2).age}


@pytest.mark.full
def test_two_ranks_agree_with_bf16(fp32: Server):
    """Linear layers are BF16 here, so what is left is the order of sums. The first scales are calibrated whatever the policy,
    with the built-in sample."""
    from vllm_fp8ext.update.contract.kv_tokens import built_in

    served_scales = served(fp32)
    assert (served_scales.policy, served_scales.source, served_scales.tokens) == (
        "calibrate",
        "built-in",
        4096,
    )
    for layer, kinds in expected(EARLY, built_in(4096, 128, 2048)).items():
        for kind, amax in kinds.items():
            assert served_scales.scales[layer][kind] == [pytest.approx(amax / 448, rel=0.03)]
            assert served_scales.layers[layer][kind].headroom == pytest.approx(0.0, abs=1e-6)


@pytest.mark.full
def test_a_policy_without_scales_is_refused_on_two_ranks_and_with_them_served(fp32: Server):
    with fp32.client() as client:
        with pytest.raises(UpdateError, match="go together"):
            client.push(LATE)
        epoch = client.weights().epoch
        ours = {
            layer: LayerScales(k=kinds["k"] / 448, v=kinds["v"] / 448)
            for layer, kinds in expected(LATE, PROMPTS).items()
        }
        client.push(LATE, version="late", kv_scales=KvScales(scales=ours))
        assert client.verify().epoch == epoch + 1
        assert client.digests().kv_scales == scale_digests(served(fp32).scales)
    asked = problems(40)
    assert accuracy(answers(fp32.url, asked), asked) > 0.9


@pytest.mark.full
def test_what_was_served_last_is_calibrated_with(fp32: Server):
    """Once that is an eighth of what is calibrated with, be it before the first update."""
    usage = complete(fp32, "12+34=", 150, n=4, temperature=1, ignore_eos=True)["usage"]
    answered = 4 * usage["prompt_tokens"] + usage["completion_tokens"]
    assert answered >= 4096 / 8
    with fp32.client() as client:
        client.push(LATE, version="recent", kv_scales=KvScales(policy="calibrate"))
    served_scales = served(fp32)
    assert (served_scales.policy, served_scales.source) == ("calibrate", "recent")
    assert answered <= served_scales.tokens <= 4096
    assert served_scales.fit is not None
    assert served_scales.fit["k"].saturated_fraction == 0.0

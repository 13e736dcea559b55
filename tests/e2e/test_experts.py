# SPDX-License-Identifier: Apache-2.0
"""Small mixtures of experts with random weights, routed in several ways: what an update leaves is what a cold start makes,
byte for byte, and tokens go to the same experts."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from vllm_fp8ext.layers.unquantized_layers import unfit
from vllm_fp8ext.memory_plan.memory import weight_memory
from vllm_fp8ext.memory_plan.model import read_model
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import EXPERT, Digests, checkpoint_digests

from .block_fp8 import write_block_fp8
from .scenarios import SECONDS, run_scenario

WIDTH = 192
"""Of an expert: no multiple of 128, and on two ranks not even one block."""
EXPERTS = 7
"""Not as many on one rank as on the other."""

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
HEADS = {"head_dim": 64, "moe_intermediate_size": WIDTH}

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "in place": ("deepseek", {"staging": "inplace"}),
    "a shared expert with a gate, from FP8": ("qwen2", {"served": "early-fp8"}),
    "Mixtral": ("mixtral", {}),
    "DeepSeek-V3": ("deepseek", {}),
    "DeepSeek-V3, expanded": ("deepseek", {"expanded": True}),
    "DeepSeek-V2, up-projections in 16 bits": ("deepseek2", {"ignore": ["*.kv_b_proj"]}),
    "GLM-4.7-Flash on two ranks": ("glm4lite", {"ranks": 2}),
    "a model that Transformers defines": ("hunyuan", {}),
    "two ranks": ("glm4", {"ranks": 2}),
    "two ranks that share out experts": ("qwen3", {"ranks": 2, "share_out": True}),
}
REPRESENTATIVES = {"in place"}
"""Settings that `make test` has. Cores that share out experts are in `test_data_parallel.py`."""
pytestmark = pytest.mark.timeout(SECONDS + 60)
DEFAULTS = {
    "served": "early",
    "staging": "shadow",
    "ranks": 1,
    "share_out": False,
    "expanded": False,
    "ignore": [],
}


def model(kind: str) -> PreTrainedModel:
    """With random weights, from torch's global generator."""
    if kind == "qwen3":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **HEADS, num_experts=EXPERTS))
    if kind == "qwen2":
        shared = {"shared_expert_intermediate_size": 256, "moe_intermediate_size": 256}
        return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE, **shared, num_experts=4))
    if kind == "mixtral":
        of = SHAPE | {"intermediate_size": WIDTH}
        return MixtralForCausalLM(MixtralConfig(**of, num_local_experts=4))
    if kind == "hunyuan":
        of = {name: size for name, size in SHAPE.items() if name != "num_experts_per_tok"}
        return HunYuanMoEV1ForCausalLM(HunYuanMoEV1Config(**of, head_dim=64, num_experts=4, moe_topk=2))
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    layers = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    made: PreTrainedModel
    if kind == "glm4":
        made = Glm4MoeForCausalLM(Glm4MoeConfig(**SHAPE, **HEADS, **groups, **layers))
    else:
        ranks = {"q_lora_rank": 128, "kv_lora_rank": 512}  # the only latent that the CPU's attention takes
        heads = {"num_key_value_heads": 4, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
        latent = SHAPE | heads | ranks | layers | {"moe_intermediate_size": WIDTH}
        scores = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        if kind == "deepseek2":
            few = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
            made = DeepseekV2ForCausalLM(DeepseekV2Config(**latent | few))
        elif kind == "glm4lite":
            made = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**latent, **groups))
        else:
            made = DeepseekV3ForCausalLM(DeepseekV3Config(**latent, **groups, **scores))
    for name, parameter in made.named_parameters():
        if "kv_b_proj" in name:  # what decoding makes of it shows in the answers
            parameter.data.mul_(20)
    for name, bias in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.uniform_(0, 0.2)
    return made


Seen = Callable[[str], Any]
"""What is there by the name of a setting, or of a kind of model: made when it is first asked for."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Of a kind of model a folder with an early and a late checkpoint; of one the early one in FP8 as well."""
    folder = tmp_path_factory.mktemp("mixtures")

    @functools.cache
    def written(kind: str) -> Path:
        for seed, name in enumerate(("early", "late")):
            torch.manual_seed(seed)
            model(kind).bfloat16().save_pretrained(folder / kind / name)
        if kind == "qwen2":
            write_block_fp8(folder / kind / "early", folder / kind / "early-fp8")
        return folder / kind

    return written


@pytest.fixture(scope="module")
def scenarios(checkpoints: Seen, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What `experts_scenario` saw with a setting."""

    @functools.cache
    def seen(name: str) -> dict[str, Any]:
        kind, options = SETTINGS[name]
        run = DEFAULTS | {"early": "early", "late": "late"} | options
        paths = {which: str(checkpoints(kind) / run[which]) for which in ("served", "early", "late")}
        folder = tmp_path_factory.mktemp("scenarios")
        (folder / "settings.json").write_text(json.dumps([run | paths]))
        [facts] = run_scenario("experts_scenario.py", folder, str(folder / "settings.json"))
        return dict(facts)

    return seen


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.full) for name in SETTINGS
    ],
)
def setting(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def facts(setting: str, scenarios: Seen) -> dict[str, Any]:
    found: dict[str, Any] = scenarios(setting)
    return found


@pytest.fixture(scope="module")
def digests(setting: str, facts: dict[str, Any], checkpoints: Seen) -> tuple[Digests, Digests]:
    """Of the early and of the late checkpoint, computed from their files."""
    folder, manifest = checkpoints(SETTINGS[setting][0]), Manifest.from_dict(facts["manifest"])
    return checkpoint_digests(folder / "early", manifest), checkpoint_digests(folder / "late", manifest)


def test_what_is_served_is_what_the_checkpoint_makes(
    facts: dict[str, Any], digests: tuple[Digests, Digests]
) -> None:
    early, late = digests
    assert facts["cold digests"]["digests"] == facts["early digests"]["digests"] == early
    assert facts["late digests"]["digests"] == late
    matrices = [name for name in early if EXPERT.search(name)]
    assert matrices
    assert all(early[name] != late[name] for name in matrices)


def test_some_matrices_of_some_experts_are_updated(
    facts: dict[str, Any], digests: tuple[Digests, Digests]
) -> None:
    early, late = digests
    chosen = set(facts["some"])
    assert 0 < len(chosen) < sum(1 for name in early if EXPERT.search(name))
    assert facts["some digests"]["digests"] == {
        name: (late if name in chosen else early)[name] for name in early
    }
    assert facts["verified"] == "some experts"


def test_fused_experts_of_one_shape_both_ways_are_refused_without_their_layout(facts: dict[str, Any]) -> None:
    """The update that says `out_in` is the one that `experts_scenario.updated` serves."""
    shapes = Manifest.from_dict(facts["manifest"]).fused
    square = [name for name, whole in shapes.items() if whole.shape[1] == whole.shape[2]]
    assert facts["not told"] == dict.fromkeys(square, "wrong-layout")


def test_one_bad_matrix_of_one_expert_refuses_an_update(setting: str, facts: dict[str, Any]) -> None:
    """What is served stays, but in place."""
    missing, infinite = facts["refused"]
    assert (missing["kind"], missing["missing"]) == ("incomplete", [missing["tensor"]])
    assert infinite["kind"] == "non-finite"
    assert [problem["tensor"] for problem in infinite["problems"]] == [infinite["tensor"]]
    if setting == "in place":
        assert facts["after refusals"] == facts["digests after refusals"] == "poisoned"
    else:
        assert facts["after refusals"] == "serving"
        assert facts["digests after refusals"] == facts["late digests"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("Mixtral", 1), ("two ranks", 2), ("DeepSeek-V3", 1), ("GLM-4.7-Flash on two ranks", 2)],
)
def test_a_plan_knows_what_a_shadow_takes(scenarios: Seen, checkpoints: Seen, name: str, ranks: int) -> None:
    model = read_model(str(checkpoints(SETTINGS[name][0]) / "early"))
    planned = weight_memory(model, ranks, fp8=True)
    found = scenarios(name)["twin bytes"]
    assert found == pytest.approx([planned] * ranks, rel=5e-3), "GLM's router is served in 32 bits"


def test_an_update_serves_what_a_cold_start_serves(facts: dict[str, Any]) -> None:
    """Tokens, their log-probabilities, and the experts of every token; not what was served in between."""
    assert facts["early again"] == facts["early"]
    (tokens, routes), (later, elsewhere) = facts["early"], facts["late"]
    assert (later != tokens, elsewhere != routes) == (True, True)
    assert {len(experts) for layer in routes for experts in layer} == {2}
    assert facts["late digests"]["addresses"] == facts["cold digests"]["addresses"]


def test_answers_are_those_of_the_same_weights_in_transformers(
    setting: str, facts: dict[str, Any], checkpoints: Seen
) -> None:
    """A definition of these models that is nobody's kernel: what tokens get from the experts, and how much of it."""
    folder = checkpoints(SETTINGS[setting][0])
    differences: list[float] = []
    spread: list[float] = []
    for checkpoint in ("early", "late"):
        reference = AutoModelForCausalLM.from_pretrained(folder / checkpoint, dtype=torch.float32).eval()
        for prompt, tokens, found in facts[checkpoint][0]:
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            differences += (expected - torch.tensor(found)).abs().tolist()
            spread += logprobs.std(-1).tolist()
    # FP8 makes 0.03 to 0.1 of it; experts that count alike, whatever the router says, 0.14 to 0.5
    assert median(differences) < 0.12 * median(spread)


@pytest.mark.full
def test_each_rank_has_experts_of_its_own(scenarios: Seen) -> None:
    tensors = scenarios("two ranks that share out experts")["manifest"]["tensors"]
    for expert in range(EXPERTS):
        name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
        (piece,) = tensors[name]["pieces"]
        rank, local = divmod(expert, 4)
        assert (piece["rank"], piece["target_shape"]) == (rank, [256, WIDTH])
        assert piece["target"].endswith(f"w2_weight[{local}]")
    assert len(tensors["model.layers.0.mlp.gate.weight"]["pieces"]) == 2


@pytest.mark.full
def test_projections_that_gemms_do_not_take_stay_in_16_bits(scenarios: Seen) -> None:
    """A shared expert of 192 columns is one that they do not take, and on two ranks it has 96; one of 256 they do."""
    for setting, name, columns in (
        ("DeepSeek-V3", "shared_experts", 192),
        ("two ranks", "shared_experts", 96),
        ("a shared expert with a gate, from FP8", "shared_expert", 256),
    ):
        tensor = scenarios(setting)["manifest"]["tensors"][f"model.layers.1.mlp.{name}.down_proj.weight"]
        assert {(piece["target_shape"][1], piece["quantized"]) for piece in tensor["pieces"]} == {
            (columns, columns == 256)
        }


def test_routers_stay_as_they_are(setting: str, facts: dict[str, Any]) -> None:
    kept = set()
    for name, tensor in facts["manifest"]["tensors"].items():
        linear = re.search(r"_proj(_with_mqa)?\.weight$", name)
        for piece in tensor["pieces"]:
            ignored = name.endswith("kv_b_proj.weight") and "ignore" in SETTINGS[setting][1]
            served = bool(linear) and not ignored and unfit(*piece["target_shape"], "bfloat16") is None
            assert piece["quantized"] == (served or bool(EXPERT.search(name))), name
        if "gate." in name or "bias" in name:
            kept.add(name.rpartition("mlp.")[2].rpartition("block_sparse_moe.")[2])
    assert ("gate.wg.weight" if SETTINGS[setting][0] == "hunyuan" else "gate.weight") in kept


@pytest.mark.full
def test_the_bias_of_a_router_and_the_gate_of_a_shared_expert_are_updated(
    scenarios: Seen,
) -> None:
    for setting, name in (
        ("DeepSeek-V3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("a shared expert with a gate, from FP8", "model.layers.0.mlp.shared_expert_gate.weight"),
    ):
        found = scenarios(setting)
        assert found["late digests"]["digests"][name] != found["cold digests"]["digests"][name]

# SPDX-License-Identifier: Apache-2.0
"""Servers with a vLLM that lacks names: all features off, one by one, and core."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.compat.interfaces import CORE, features
from vllm_fp8ext.demo.server import SMALL, Server

from .ask import complete
from .conftest import answering
from .lacking import remove, vllm_without

GONE = {
    "beam_versions": "_render_and_run_requests",
    "dialect_versions": "messages_full_converter",
    "decode_attention": "_get_scheduler_metadata",
    "decode_step_reuse": "batch_desc",
    "flat_answers": "_create_tokens_logprobs",
    "flat_logprobs": "_update_sample_logprobs",
    "fp32_head": "head_dtype",
    "fusion": "hash_source",
    "json_responses": "JSONResponse",
    "warmup": "_generate_optimal_warmup_m_values",
    "mask_warmup": "register_top_k_top_p_warmups",
    "mixed_full_cudagraph": "gather_batch_req_state",
    "output_interval": "FINAL_ONLY",
    "piecewise_capture_sizes": "_init_candidates",
    "quantized_attention": "kv_cache_dummy_dep",
    "sampling_cudagraph": "head_dtype",
    "shared_segments": "ShmTensorArena",
    "slot_fast_path": "num_cached_block",
    "token_logprobs": "compute_token_logprobs",
    "weight_transfer": "register_engine",
    "weight_versions": "track_weight_version",
}
"""By feature, a name that no vLLM of the future need have."""
AND_WITH_FUSION = {"norm_rope"}
"""Features that lean on no name of their own."""


def paths(folder: Path) -> dict[str, str]:
    """The environment in which `vllm` is the package there."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


class OtherVllm(Server):
    """A server that is not forked from a process which has imported the installed vLLM."""

    popen = subprocess.Popen


def serving(folder: Path, names: list[str]) -> Server:
    """A server whose vLLM lacks these names."""
    # its engine need not import that vLLM once more
    variables = {**paths(vllm_without(folder, names)), "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"}
    return OtherVllm(EARLY, folder / "log", arguments=SMALL, variables=variables)


def off(server: Server) -> dict[str, str | None]:
    """Reasons by the names of features that are off."""
    with server.client() as client:
        return {one.name: one.reason for one in client.weights().features if not one.on}


def leaning_on(gone: str) -> set[str]:
    """Features whose files say that they lean on this name, of whatever module or class."""
    return {
        name
        for name, feature in features().items()
        if any(gone in interface.name.split(".") for interface in feature.interfaces)
    }


def check(server: Server, lacking: set[str]) -> None:
    """It answers, with logprobs, and takes an update; it says what is off, once in its log."""
    answers = [complete(server, "12+34=", 8, logprobs=1, ignore_eos=True)["choices"][0]]
    with server.client() as client:
        assert client.push(LATE, version="late").result["epoch"] == 1
        assert client.weights().version == "late"
    answers.append(complete(server, "12+34=", 8, logprobs=1, ignore_eos=True)["choices"][0])
    assert [len(answer["logprobs"]["tokens"]) for answer in answers] == [8, 8]
    spans = [
        [(one["version"], one["end"]) for one in answer.get("weight_versions", ())] for answer in answers
    ]
    assert spans == ([[], []] if "weight_versions" in lacking else [[("epoch-0", 8)], [("late", 8)]])
    log = server.log.read_text()
    for name in lacking:
        assert (
            len(re.findall(rf"WARNING .*the feature {name} is off: vLLM lacks a name: .*{GONE[name]}", log))
            == 1
        )


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose vLLM lacks a name of every feature."""
    folder = tmp_path_factory.mktemp("lacking")
    server = serving(folder, sorted({*GONE.values()}))
    with answering(server):
        yield server
    remove(folder)


def test_every_feature_has_a_name_here() -> None:
    assert {*GONE, *AND_WITH_FUSION, CORE} == set(features())


@pytest.mark.full
def test_a_server_without_any_feature_serves_and_takes_updates(faulty: Server) -> None:
    told = off(faulty)
    assert set(told) == {*GONE, *AND_WITH_FUSION}
    for name, reason in told.items():
        assert "lacks" in str(reason) or "it needs" in str(reason), name
    check(faulty, set(GONE))


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("feature", GONE)
def test_a_server_without_one_feature_has_the_others(feature: str, tmp_path: Path) -> None:
    with answering(server := serving(tmp_path, [GONE[feature]])):
        lacking = {name for name, reason in off(server).items() if "lacks" in str(reason)}
        same = {name for name in GONE if GONE[name] == GONE[feature]} | leaning_on(GONE[feature])
        assert lacking == same | (AND_WITH_FUSION & lacking)
        check(server, {feature})
    remove(tmp_path)


@pytest.mark.full
def test_a_server_without_a_name_of_core_does_not_start(tmp_path: Path) -> None:
    folder = vllm_without(tmp_path, ["hash_source", "set_weight_version"])
    program = (
        "from vllm import EngineArgs\n"
        f"EngineArgs({str(EARLY)!r}, quantization='blockfp8', max_model_len=2048).create_engine_config()"
    )
    env = {**os.environ, **paths(folder)}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "--quantization blockfp8 needs interfaces that this vLLM lacks:" in done.stderr
    assert "EngineCore.set_weight_version is missing; needed to label each token" in done.stderr
    assert "hash_source" not in done.stderr.rpartition("needs interfaces")[2]
    remove(tmp_path)

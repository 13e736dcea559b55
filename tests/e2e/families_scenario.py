# SPDX-License-Identifier: Apache-2.0
"""Families whose names, buffers or ties are special, served and updated one after the other. Takes a file, to which it writes
what it saw, as JSON, and names of families."""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

from families import tied, written
from foreign_loaders import ways
from safetensors.torch import save_file
from torch import Tensor
from vllm import LLM, SamplingParams

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests

Facts = dict[str, Any]


def engine_on(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder),
        quantization="blockfp8",
        max_model_len=128,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=32 << 20,
        skip_tokenizer_init=True,
        limit_mm_per_prompt={"image": 0, "video": 0},
        **options,
    )


def sample(llm: LLM) -> list[Any]:
    """Token ids that the engine goes on with, greedily, and their log-probabilities."""
    wanted = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], wanted, use_tqdm=False)
    ids = list(output.outputs[0].token_ids)
    steps = zip(ids, output.outputs[0].logprobs or [], strict=True)
    return [ids, [step[token].logprob for token, step in steps]]


def refusal(call: Callable[[], Any]) -> Any:
    """What a call is refused with, or None."""
    try:
        call()
    except UpdateError as error:
        return [error.kind, error.details.get("problems")]
    return None


def names(weights: Client, other: Path, tensors: dict[str, Tensor]) -> Facts:
    """Another checkpoint comes under transformers' names, then under the checkpoint's own, then under wrapped ones."""
    manifest = Manifest.from_dict(weights.manifest())
    expected = checkpoint_digests(other, manifest)
    renamed = {name for name in tensors if manifest.canonical(name) != name}
    facts: Facts = {"renamed": len(renamed)}
    weights.push(tensors, version="transformers")
    facts["transformers' names"] = weights.digests().digests == expected
    weights.push(dict(stored(other)), version="checkpoint")
    facts["the checkpoint's names"] = weights.digests().digests == expected
    if renamed:
        facts["both names"] = refusal(lambda: weights.push({**tensors, **dict(stored(other))}))[0]
        name = min(renamed)
        problem = refusal(lambda: weights.push({**tensors, name: tensors[name][:1]}))[1][0]
        facts["told as it was sent"] = [problem["kind"], problem["sent_as"] == name]
    file = other / "renamed"
    file.mkdir()
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in manifest.tied},
        file / "model.safetensors",
    )
    facts["digests of transformers' names"] = checkpoint_digests(file, manifest) == expected
    name = next(name for name in sorted(tensors) if name.endswith(("mlp.up_proj.weight", "q_proj.weight")))
    for wrapped in (
        name.replace("layers.", "_fsdp_wrapped_module.layers._fsdp_wrapped_module.", 1),
        name.replace(".weight", ".base_layer.weight"),
        f"_orig_mod.{name}",
        f"module.{name}",
    ):
        sent = {wrapped if known == name else known: tensor for known, tensor in tensors.items()}
        kind, problems = refusal(lambda sent=sent: weights.push(sent))
        facts.setdefault("hints", []).append([kind, problems[0]["detail"]])
    facts["hint"] = f"is {manifest.canonical(name)} meant?"
    return facts


def ties(weights: Client, late: dict[str, Tensor]) -> Facts:
    """While `late` is served, an output layer comes beside the embedding that is served as it: equal, or not; together, in
    chunks of their own, or alone."""
    manifest = Manifest.from_dict(weights.manifest())
    head, embedding = next(iter(manifest.tied.items()))
    before = weights.digests()
    sent = {manifest.canonical(name): tensor for name, tensor in late.items()}
    same, other = sent.pop(embedding), sent[head].clone()
    del sent[head]
    other[-1, -1] = 2.0
    ways: dict[str, Any] = {
        "one mapping": {**sent, embedding: same, head: other},
        "the embedding first": iter([*sent.items(), (embedding, same), (head, other)]),
        "the output layer first": iter([(head, other), (embedding, same), *sent.items()]),
        "another shape": {**sent, embedding: same, head: other[:7]},
    }
    facts: Facts = {"tied": [head, embedding]}
    for way, tensors in ways.items():
        kind, problems = refusal(lambda tensors=tensors: weights.push(tensors, chunk_bytes=1000))
        facts[way] = [kind, {problem["tensor"] for problem in problems} <= {head, embedding}]
    epoch = weights.weights().epoch
    facts["alone"] = refusal(lambda: weights.push({head: other}, partial=True, base_epoch=epoch))[0]
    facts["untouched"] = weights.digests() == before
    weights.push({head: same}, partial=True, base_epoch=epoch)
    facts["alone and equal"] = weights.digests().digests == before.digests
    return facts


def loads(llm: LLM, weights: Client, early: Path, late: Path) -> Facts:
    """A trainer loads weights by `model.load_weights` in the workers, then writes past every loader."""
    manifest = Manifest.from_dict(weights.manifest())
    names = sorted(dict(stored(late)))
    for bucket in (names[::2], names[1::2]):
        llm.collective_rpc("load", args=(str(late), bucket))
    facts: Facts = {"before the end": weights.weights().epoch}
    llm.collective_rpc("mark", args=("process_weights_after_loading",))
    facts["served"] = [
        weights.digests().digests == checkpoint_digests(late, manifest),
        weights.verify().epoch,
    ]
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(early)})
    facts["reloaded"] = [
        weights.digests().digests == checkpoint_digests(early, manifest),
        weights.verify().epoch,
    ]
    llm.collective_rpc("write", args=("model.norm.weight",))
    try:
        weights.verify()
    except UpdateError as error:
        facts["written past all loaders"] = [error.kind, weights.weights().state]
    llm.collective_rpc("load", args=(str(late), names), kwargs={"end": "finalize_layerwise_reload"})
    facts["healed"] = [
        weights.digests().digests == checkpoint_digests(late, manifest),
        weights.weights().state,
    ]
    return facts


def doors(llm: LLM, weights: Client, late: dict[str, Tensor]) -> Facts:
    """Others try to load weights into the served model."""
    before, sampled = weights.digests(), sample(llm)
    facts: Facts = {way: llm.collective_rpc("tried", args=(way,)) for way in ways}
    for call in (
        lambda: llm.collective_rpc("write_by_loader", args=("model.norm.weight",)),
        lambda: llm.collective_rpc("update_weights", args=({},)),
    ):
        try:
            call()
        except Exception as error:
            facts.setdefault("raised", []).append(str(error))
    facts["untouched"] = [
        weights.digests() == before,
        sample(llm) == sampled,
        weights.verify().epoch == before.epoch,
    ]
    weights.push(late)
    facts["pushed"] = weights.digests().digests != before.digests
    return facts


def scalars(value: float) -> Callable[[Any], None]:
    """Sets those of Gemma 4's layers."""

    def change(model: Any) -> None:
        for number, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(value + number)

    return change


def engine_scenario(
    family: str, early: Path, late: Path, tensors: dict[str, Tensor], **options: Any
) -> Facts:
    llm = engine_on(early, worker_extension_cls="foreign_loaders.ForeignLoaders", **options)
    try:
        with embedded_blocking(llm) as weights:
            manifest = Manifest.from_dict(weights.manifest())
            facts: Facts = {"cold": weights.digests().digests == checkpoint_digests(early, manifest)}
            facts["scalars"] = [name for name in manifest.pieces if name.endswith("layer_scalar")]
            facts["sampled"] = [sample(llm)]
            facts["head copies"] = [llm.collective_rpc("head_copies")]
            if family == "qwen3":
                facts["doors"] = doors(llm, weights, tensors)
                facts["loads"] = loads(llm, weights, early, late)
            else:
                facts |= names(weights, late, tensors)
            if manifest.tied:
                facts["ties"] = ties(weights, tensors)
            facts["sampled"].append(sample(llm))
            facts["head copies"].append(llm.collective_rpc("head_copies"))
            return facts
    finally:
        llm.llm_engine.engine_core.shutdown()


def scenario(family: str, folder: Path) -> Facts:
    early, late = folder / f"{family}-early", folder / f"{family}-late"
    if family == "gemma4":
        written(early, family, 0, scalars(0.5))
        return engine_scenario(family, early, late, written(late, family, 1, scalars(1.5)))
    first = written(early, family, 0)
    tensors = written(late, family, 1)
    if family != "qwen3":
        return engine_scenario(family, early, late, tensors)
    for path, content in (
        (early, first),
        (late, tensors),
    ):  # as Qwen3-0.6B's: tied, and an equal output layer beside it
        content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
        tied(path, content)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    options["additional_config"] = {"fp8ext": {"lm_head": "blockfp8"}}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    return engine_scenario(family, early, late, tensors, **options)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    found = {}
    for family in sys.argv[2:]:
        found[family] = scenario(family, out.parent)
        gc.collect()
    out.write_text(json.dumps(found))

# SPDX-License-Identifier: Apache-2.0
"""An engine with an FP8 KV cache in this process, stopped between steps to look at its cache. Writes what it saw.

kv_scenario.py plain|hybrid FACTS
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from torch import Tensor
from transformers import Gemma3TextConfig
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention import Attention

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.compat.update.kv_cache import HeldBlocks, held_blocks, key_value_views
from vllm_fp8ext.compat.update.kv_recorder import KvRecorder
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.attention.kv_amax import K, Q, V
from vllm_fp8ext.kernels.attention.rescale_kv import CachedLayer, ratio_of, rescale_kv

BLOCK = 32
WINDOW = 64
OPTIONS: dict[str, Any] = {
    "kv_cache_dtype": "fp8",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 16 << 20,
    "gpu_memory_utilization": 0.1,
    "skip_tokenizer_init": True,
    "async_scheduling": False,
    "block_size": BLOCK,
}
PROMPTS = {"a": range(3, 36), "b": range(2, 102), "c": range(40, 45)}
TOKENS = 60
SCALE = 0.25


def hybrid_folder() -> str:
    """A model whose layers look at a window, but for each third one."""
    config = Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=256,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=512,
        architectures=["Gemma3ForCausalLM"],
    )
    config.dtype = "bfloat16"
    folder = tempfile.mkdtemp()
    config.save_pretrained(folder)
    return folder


class Scenario:
    def __init__(self, llm: LLM) -> None:
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        model = self.core.model_executor.driver_worker.worker.model_runner.model
        self.layers = {m.layer_name: m for m in model.modules() if isinstance(m, Attention)}
        self.written: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        """By layer, K, V and slots of each step."""
        self.queries: dict[str, list[Tensor]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.compared = 0

    def begin(self) -> None:
        wanted = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        for name, prompt in PROMPTS.items():
            self.engine.add_request(name, {"prompt_token_ids": [n % 120 + 2 for n in prompt]}, wanted)

    def steps(self, most: int = 1000) -> int:
        count = 0
        while self.engine.has_unfinished_requests() and count < most:
            for output in self.engine.step():
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)
            count += 1
        return count

    def sampled(self) -> dict[str, list[int]]:
        self.steps()
        self.core.scheduler.reset_prefix_cache()
        return dict(self.tokens)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What reaches the cache and the layer, seen elsewhere than the recorder looks."""
        for name, layer in self.layers.items():
            self.written[name], self.queries[name] = [], []
            self._watch(name, layer)
        yield
        for layer in self.layers.values():
            del layer.impl.do_kv_cache_update, layer.forward

    def _watch(self, name: str, layer: Any) -> None:
        update, forward = layer.impl.do_kv_cache_update, layer.forward

        def seen_update(module: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
            here = slots >= 0
            self.written[name].append((key[: len(slots)][here], value[: len(slots)][here], slots[here]))
            update(module, key, value, cache, slots)

        def seen_forward(query: Tensor, *args: Any, **named: Any) -> Tensor:
            self.queries[name].append(query.clone())
            return forward(query, *args, **named)

        layer.impl.do_kv_cache_update, layer.forward = seen_update, seen_forward

    def views_hold_what_was_written(self, held: HeldBlocks) -> bool:
        """In each full block that is held, for each head apart: the same values, in whatever order, within one code (vLLM's
        kernel for CPUs rounds towards zero)."""
        for name in held.layers:
            for index, cache in enumerate(key_value_views(self.layers[name])):
                last: dict[int, Tensor] = {}
                for step in self.written[name]:
                    last.update(zip(step[2].tolist(), step[index].float(), strict=True))
                for block in held.blocks:
                    slots = [slot for slot in last if slot // BLOCK == block]
                    if len(slots) < BLOCK:
                        continue
                    wanted = torch.stack([last[slot] for slot in slots])
                    result = cache[block].view(torch.float8_e4m3fn).float()
                    wanted, result = (part.transpose(0, 1).flatten(1).sort()[0] for part in (wanted, result))
                    if not bool(((wanted - result).abs() <= (wanted.abs() / 8).clamp_min(2**-9)).all()):
                        return False
                    self.compared += 1
        return True

    def rescale(self, held: list[HeldBlocks]) -> Any:
        """Divide all scales by four; the counts, and whether cached values stayed as they were."""
        old, new = torch.tensor(1.0), torch.tensor(SCALE)
        total, same = None, True
        for group in held:
            views = [key_value_views(self.layers[name]) for name in group.layers]
            before = [_values(view, group.blocks) for pair in views for view in pair]
            ratio = ratio_of(old, new, views[0][0].shape[2])
            counts = rescale_kv([CachedLayer(*pair, ratio, ratio) for pair in views], group.rows(views[0][0]))
            after = [_values(view, group.blocks) * SCALE for pair in views for view in pair]
            same &= all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            total = counts if total is None else total + counts
        self.scale(SCALE)
        assert total is not None
        return [total.codes, total.saturated, total.flushed], same

    def scale(self, value: float) -> None:
        for layer in self.layers.values():
            layer._k_scale_float = layer._v_scale_float = value
            layer._k_scale.fill_(value)
            layer._v_scale.fill_(value)


def _values(view: Tensor, blocks: tuple[int, ...]) -> Tensor:
    return view[list(blocks)].view(torch.float8_e4m3fn).float()


def _refusal(layer: Any, **changes: Any) -> str:
    before = {key: getattr(layer, key) for key in changes}
    try:
        for key, value in changes.items():
            setattr(layer, key, value)
        key_value_views(layer)
    except ConfigError as error:
        return str(error)
    finally:
        for key, value in before.items():
            setattr(layer, key, value)
    return ""


def recorded(scenario: Scenario, every: int) -> dict[str, Any]:
    """A run of few steps that is watched and recorded."""
    before = {name: vars(layer.impl).get("forward") for name, layer in scenario.layers.items()}
    recorder = KvRecorder(scenario.layers, every)
    with scenario.watched():
        scenario.begin()
        steps = scenario.steps(7)
    seen = recorder.take()
    empty = recorder.take()
    for name, layer in scenario.layers.items():
        vars(layer.impl).pop("forward")
        if before[name] is not None:
            layer.impl.forward = before[name]
    result: dict[str, Any] = {"steps": steps, "equal": True, "elements": [], "saturated": 0}
    for name, layer in scenario.layers.items():
        queries = [query.view(len(query), layer.num_kv_heads, -1) for query in scenario.queries[name]]
        for side, parts in (
            (K, [step[0] for step in scenario.written[name]]),
            (V, [step[1] for step in scenario.written[name]]),
            (Q, queries),
        ):
            some = torch.cat(parts[::every]).float().abs()
            result["equal"] &= int(seen[name].elements[side]) == some[:, 0].numel()
            if side == Q and layer.query_quant is not None:  # recorded as the kernel sees it, in FP8
                close = torch.isclose(seen[name].amax[side], some.amax(dim=(0, 2)).cpu(), rtol=1 / 16)
                result["equal"] &= bool(close.all())
                continue
            result["equal"] &= torch.equal(seen[name].amax[side], some.amax(dim=(0, 2)).cpu())
            limit = 448 * float((layer._k_scale, layer._v_scale, layer._q_scale)[side])
            result["equal"] &= torch.equal(seen[name].saturated[side], (some > limit).sum(dim=(0, 2)).cpu())
        result["elements"].append(seen[name].elements.tolist())
        result["saturated"] += int(seen[name].saturated.sum())
    result["empty"] = not any(part.elements.any() or part.amax.any() for part in empty.values())
    result["left alone"] = not any("forward" in vars(layer.impl) for layer in scenario.layers.values())
    return result


def main(kind: str, file: Path) -> None:
    model = {"model": str(EARLY)} if kind == "plain" else {"model": hybrid_folder(), "load_format": "dummy"}
    scenario = Scenario(LLM(**model, **OPTIONS))
    facts: dict[str, Any] = {"idle": [group.blocks for group in held_blocks(scenario.core)]}
    scenario.begin()
    facts["sampled"] = scenario.sampled()
    with scenario.watched():
        scenario.begin()
        scenario.steps(40)
        held = held_blocks(scenario.core)
    facts["held"] = [[list(group.layers), group.block_size, list(group.blocks)] for group in held]
    facts["written"] = {
        name: sorted({int(slot) // BLOCK for step in steps for slot in step[2]})
        for name, steps in scenario.written.items()
    }
    facts["views"] = all(scenario.views_hold_what_was_written(group) for group in held)
    facts["compared"] = scenario.compared
    facts["rescaled"], facts["values stay"] = scenario.rescale(held)
    facts["sampled after"] = scenario.sampled()
    facts["after"] = [group.blocks for group in held_blocks(scenario.core)]
    scenario.scale(1.0)
    scenario.begin()
    scenario.steps(40)
    scenario.scale(SCALE)
    facts["sampled without"] = scenario.sampled()
    scenario.scale(1.0)
    facts["recorded"] = recorded(scenario, 1)
    scenario.sampled()
    scenario.scale(2.0**-10)
    facts["recorded some"] = recorded(scenario, 3)
    layer = next(iter(scenario.layers.values()))
    facts["refusals"] = [
        _refusal(layer, kv_cache_dtype="fp8_e5m2"),
        _refusal(layer, head_size_v=16),
        _refusal(layer, kv_cache=layer.kv_cache[..., :-1]),
    ]
    file.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

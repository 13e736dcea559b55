# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs that sample, and what they read of requests."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FEATURE: str = "sampling_cudagraph"
WHY: str = (
    "Sample in CUDA graphs: vLLM launches the output layer and the sampler one by one, and "
    "small models wait for the host."
)
GAIN: str = "see decode_step_reuse"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "sample in CUDA graphs": (
        "vllm.v1.worker.gpu.sample.sampler:Sampler.get_logprobs_dims(idx_mapping_np)",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.needs_logits_processing",
        "vllm.v1.worker.gpu.sample.states:SamplingStates(max_num_reqs, vocab_size)",
        "vllm.v1.worker.gpu.sample.output:SamplerOutput("
        "sampled_token_ids, logprobs_tensors, num_sampled, num_rejected)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "sampling_cudagraph can go"
GPU_ONLY: bool = True

_SCALED = "fp8ext_scaled"
"""Attribute of a sampler's `SamplingStates`: for each place whether its request changes logits by its temperature
alone.
"""


class SamplingGraph(NamedTuple):
    """A captured graph, what it writes and what it reads."""

    graph: torch.cuda.CUDAGraph
    sampled: Any
    """`SamplerOutput` of as many rows as the graph has."""
    batch: Any
    """`InputBatch` with what the graph reads."""


class Samplers:
    """Graphs that sample, and what they read of `S` requests beside the model's outputs.

    They are chosen by rows, log-probabilities and whether logits are scaled by temperatures.
    """

    def __init__(self, requests: int, device: torch.device) -> None:
        self.places_R = torch.zeros(requests, dtype=torch.int64, device=device)
        self.temperature_S = torch.zeros(requests, device=device)
        self.seeds_S = torch.zeros(requests, dtype=torch.int64, device=device)
        self.prompts_S = torch.zeros(requests, dtype=torch.int32, device=device)
        self.graphs: dict[tuple[int, int | None, bool], SamplingGraph] = {}
        self._places: Tensor | None = None
        """Places of the requests whose settings these tensors hold."""
        self._chosen: SamplingGraph | None = None
        """The graph that samples for them, with as many rows as they are."""

    def sample(self, runner: Any, batch: Any) -> Any:
        """Like `GPUModelRunner.sample`; None if no graph does that."""
        if batch.idx_mapping is not self._places:
            self._choose_graph(runner, batch)
        if self._chosen is None:
            return None
        # what was sampled before may still be on its way to the host
        runner.main_stream.wait_stream(runner.output_copy_stream)
        self._chosen.graph.replay()
        sampled = self._chosen.sampled
        return sampled, sampled.num_sampled, sampled.num_rejected

    def _choose_graph(self, runner: Any, batch: Any) -> None:
        """Other requests came: find their graph, and bring what it reads."""
        self._places, self._chosen = batch.idx_mapping, None
        sampler = runner.sampler
        if not only_scales(sampler, batch.idx_mapping_np):
            return
        counts = sampler.get_logprobs_dims(batch.idx_mapping_np)
        if counts is not None and counts[1]:
            return
        scaled = bool(sampler.needs_logits_processing[batch.idx_mapping_np].any())
        captured = self.graphs.get((batch.num_tokens_after_padding, counts and counts[0], scaled))
        if captured is None:
            return
        states = sampler.sampling_states
        self.places_R[: batch.num_reqs].copy_(batch.idx_mapping)
        self.temperature_S.copy_(states.temperature.gpu)
        self.seeds_S.copy_(states.seeds.gpu)
        self.prompts_S.copy_(runner.req_states.prefill_len.gpu)
        self._chosen = captured._replace(sampled=first_rows(captured.sampled, batch.num_reqs))


def only_scales(sampler: Any, places: Any) -> bool:
    """Tell whether requests change logits by their temperature alone."""
    states = sampler.sampling_states
    return bool(
        not (sampler.needs_logits_processing[places] & ~scaled_places(states)[places]).any()
        and (states.top_k.np[places] == states.vocab_size).all()
        and (states.top_p.np[places] == 1.0).all()
    )


def first_rows(sampled: Any, count: int) -> Any:
    """A `SamplerOutput` of the first requests."""
    logprobs = sampled.logprobs_tensors
    if logprobs is not None:
        logprobs = logprobs._replace(
            logprob_token_ids=logprobs.logprob_token_ids[:count],
            logprobs=logprobs.logprobs[:count],
            selected_token_ranks=logprobs.selected_token_ranks[:count],
        )
    return dataclasses.replace(
        sampled,
        sampled_token_ids=sampled.sampled_token_ids[:count],
        logprobs_tensors=logprobs,
        num_sampled=sampled.num_sampled[:count],
        num_rejected=sampled.num_rejected[:count],
    )


def scaled_places(states: Any) -> Any:
    """Tell for each place of `SamplingStates` whether its request changes logits by its temperature alone."""
    if not hasattr(states, _SCALED):
        setattr(states, _SCALED, np.zeros(len(states.temperature.np), dtype=bool))
    return getattr(states, _SCALED)

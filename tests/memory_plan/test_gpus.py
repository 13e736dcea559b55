# SPDX-License-Identifier: Apache-2.0
"""Names of GPUs, and vLLM's defaults by their memory: against the installed vLLM."""

from types import SimpleNamespace

import pytest

from vllm_fp8ext.config import GIB
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.memory_plan.gpus import GPUS, Gpu, gpu
from vllm_fp8ext.memory_plan.memory import UTILIZATION


@pytest.mark.parametrize("device", [*GPUS.values(), Gpu(name="48 GiB", total=48 * GIB)], ids=lambda d: d.name)
def test_steps_are_as_large_as_vllm_makes_them(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    platform = SimpleNamespace(
        get_device_total_memory=lambda: device.total,
        get_device_name=lambda: f"NVIDIA {device.name}",
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(1)
    server = UsageContext.OPENAI_API_SERVER
    assert (device.max_num_batched_tokens, device.max_num_seqs) == (tokens[server], seqs[server])


def test_the_share_of_memory_is_vllms() -> None:
    from vllm.config import CacheConfig

    assert CacheConfig().gpu_memory_utilization == UTILIZATION


def test_names_and_sizes() -> None:
    assert gpu("h200", None) is GPUS["H200"]
    assert gpu(None, 48) == Gpu(name="48 GiB", total=48 * GIB)
    assert gpu("H100", 93.1) == Gpu(name="H100", total=int(93.1 * GIB))


def test_an_unknown_name() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown GPU 'RTX': give --memory-gib, or one of A100-40GB, .*, B200"
    ):
        gpu("RTX", None)


def test_nothing_given() -> None:
    with pytest.raises(ConfigError, match="which GPU"):
        gpu(None, None)

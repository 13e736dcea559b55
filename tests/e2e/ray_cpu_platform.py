# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with what Ray's executor asks a platform for: Ray counts CPUs here as if they were GPUs."""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """For vLLM's platform plugins."""

    ray_device_key = "GPU"

# SPDX-License-Identifier: Apache-2.0
"""A platform plugin of vLLM for tests: `ray_cpu_platform`. Imports nothing, since it is asked while vLLM is imported."""


def platform() -> str:
    """The entry point."""
    return "ray_cpu_platform.RayCpuPlatform"

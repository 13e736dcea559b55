# SPDX-License-Identifier: Apache-2.0
"""The numerics of blockwise FP8: what is quantized how. Never imports vLLM."""

# SPDX-License-Identifier: Apache-2.0
"""Layers that vLLM builds a model of: the quantization method, linear layers, experts, the KV-cache method."""

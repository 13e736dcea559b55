# SPDX-License-Identifier: Apache-2.0
"""What vLLM builds a model of: the quantization method, linear layers, experts, the KV-cache method."""

# SPDX-License-Identifier: Apache-2.0
"""Tensors on a GPU of the same machine, read through CUDA's inter-process handles."""

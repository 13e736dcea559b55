# SPDX-License-Identifier: Apache-2.0
"""Tensors on a GPU of the server's machine, as CUDA's inter-process handles."""

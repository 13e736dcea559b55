# SPDX-License-Identifier: Apache-2.0
"""GEMM kernels for small M, and which kernel runs."""

# SPDX-License-Identifier: Apache-2.0
"""Shapes and timing of kernels, for tests and benchmarks."""

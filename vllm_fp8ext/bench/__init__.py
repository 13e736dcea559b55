# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of kernels and of whole engines, on one GPU."""

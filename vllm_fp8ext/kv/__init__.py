# SPDX-License-Identifier: Apache-2.0
"""Scales of the FP8 KV cache: who computes them, where they live, and when they change."""

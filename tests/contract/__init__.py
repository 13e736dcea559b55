# SPDX-License-Identifier: Apache-2.0
"""Wrapped methods against vLLM's real classes."""

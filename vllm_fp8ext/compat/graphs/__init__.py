# SPDX-License-Identifier: Apache-2.0
"""Passes over vLLM's compiled graphs."""

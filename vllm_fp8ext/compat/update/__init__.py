# SPDX-License-Identifier: Apache-2.0
"""Reaches into vLLM's insides for updates."""

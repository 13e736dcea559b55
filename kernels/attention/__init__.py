# SPDX-License-Identifier: Apache-2.0
"""Attention of requests that decode, and the KV cache."""

# SPDX-License-Identifier: Apache-2.0
"""Tensors that the trainer broadcasts to every rank."""

# SPDX-License-Identifier: Apache-2.0
"""Tensors that are broadcast to every rank of the servers."""

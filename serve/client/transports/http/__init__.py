# SPDX-License-Identifier: Apache-2.0
"""Tensors as the bodies of requests."""

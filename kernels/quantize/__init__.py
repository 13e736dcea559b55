# SPDX-License-Identifier: Apache-2.0
"""Quantizers of weights and activations."""

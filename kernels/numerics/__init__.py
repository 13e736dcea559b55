# SPDX-License-Identifier: Apache-2.0
"""The reference, and what all kernels share of it."""

# SPDX-License-Identifier: Apache-2.0
"""Compilation of kernels before a server is ready."""

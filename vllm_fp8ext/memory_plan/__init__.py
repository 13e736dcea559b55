# SPDX-License-Identifier: Apache-2.0
"""Estimates of what fits on a GPU, from a model's config alone."""

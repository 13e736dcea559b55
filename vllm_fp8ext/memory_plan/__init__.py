# SPDX-License-Identifier: Apache-2.0
"""What fits on a GPU, from a model's config alone."""

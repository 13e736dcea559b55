# SPDX-License-Identifier: Apache-2.0
"""Matrix products with few tokens, and which kernel runs."""

# SPDX-License-Identifier: Apache-2.0
"""What small mixtures of experts are asked, as token ids."""

PROMPTS = [[3 + (7 * i + 11 * row) % 120 for i in range(24)] for row in range(3)]

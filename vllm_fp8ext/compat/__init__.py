# SPDX-License-Identifier: Apache-2.0
"""The only room that touches vLLM's insides. Each module says what it replaces, why, and when it can go."""

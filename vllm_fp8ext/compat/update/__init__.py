# SPDX-License-Identifier: Apache-2.0
"""What updates touch of vLLM's insides."""

# SPDX-License-Identifier: Apache-2.0
"""Steps that cost the host and the GPU less than vLLM's own."""

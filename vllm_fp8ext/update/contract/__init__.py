# SPDX-License-Identifier: Apache-2.0
"""The contract of client, server, engine and worker; imports neither torch nor vLLM at module level."""

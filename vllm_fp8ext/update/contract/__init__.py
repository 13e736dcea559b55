# SPDX-License-Identifier: Apache-2.0
"""What client, server, engine and worker agree on; imports neither torch nor vLLM at module level."""

# SPDX-License-Identifier: Apache-2.0
"""vLLM's own routes for trainers, behind a key and on the update session."""

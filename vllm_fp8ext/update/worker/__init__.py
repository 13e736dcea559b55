# SPDX-License-Identifier: Apache-2.0
"""One rank: the shadow copy, staging, the swap, digests, KV-cache scales."""

# SPDX-License-Identifier: Apache-2.0
"""The live update inside an engine: manifest, twin, staging, exchange, digests, and the session that ties them."""

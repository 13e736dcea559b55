# SPDX-License-Identifier: Apache-2.0
"""What lives in the API server and in the trainer: routes, schema, keys, client."""

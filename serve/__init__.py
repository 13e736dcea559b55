# SPDX-License-Identifier: Apache-2.0
"""The API server's and the trainer's side: routes, schema, keys, client."""

# SPDX-License-Identifier: Apache-2.0
"""Load tests against a running server, with weight updates in between."""

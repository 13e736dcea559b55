# SPDX-License-Identifier: Apache-2.0
"""The client, blocking and on an event loop, against HTTP servers that do what they should, or drop it."""

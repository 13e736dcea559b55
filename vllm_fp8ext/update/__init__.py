# SPDX-License-Identifier: Apache-2.0
"""A weight update, from what client and server agree on to what a rank does with a tensor."""

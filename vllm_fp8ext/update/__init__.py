# SPDX-License-Identifier: Apache-2.0
"""Weight updates, from the contract of client and server to one rank's tensors."""

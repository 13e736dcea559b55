# SPDX-License-Identifier: Apache-2.0
"""How the client sends tensors."""

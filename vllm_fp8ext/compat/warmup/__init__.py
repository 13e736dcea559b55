# SPDX-License-Identifier: Apache-2.0
"""What is compiled before a server is ready."""

# SPDX-License-Identifier: Apache-2.0
"""How kernels are compiled and launched."""

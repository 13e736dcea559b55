# SPDX-License-Identifier: Apache-2.0
"""The engine core: the session, preparation, the commit, verification, sleep."""

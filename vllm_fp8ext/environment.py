# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of this package."""

ADMIN_KEY = "FP8EXT_ADMIN_KEY"
"""Secret that guards the routes under `/fp8ext/v1`. Without it they are not mounted."""

URL = "FP8EXT_URL"
"""Default server of `fp8ext push` and other clients."""

# SPDX-License-Identifier: Apache-2.0
"""`fp8ext demo`: a real server, a tiny model that adds numbers, and a weight update under traffic."""

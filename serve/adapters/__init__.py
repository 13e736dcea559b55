# SPDX-License-Identifier: Apache-2.0
"""Trainers that push by this package's client: one file each, imported where its trainer is installed."""

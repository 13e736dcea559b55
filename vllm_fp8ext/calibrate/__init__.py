# SPDX-License-Identifier: Apache-2.0
"""`fp8ext calibrate`: a checkpoint with the scales of its FP8 KV cache."""

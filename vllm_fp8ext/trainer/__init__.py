# SPDX-License-Identifier: Apache-2.0
"""The trainer's half of RL on FP8 rollouts. Needs torch, neither vLLM nor a trainer framework."""

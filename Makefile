# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python3
VENV ?= .venv
# auto takes the CUDA build of vLLM where there is an NVIDIA GPU, else the CPU build
BUILD ?= auto

.PHONY: setup demo test check clean

setup:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --build $(BUILD)

demo: setup
	@$(VENV)/bin/fp8ext demo

test:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --build $(BUILD) --beside
	@VENV=$(VENV) scripts/test

check: setup
	@VENV=$(VENV) scripts/check

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

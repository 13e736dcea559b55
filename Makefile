# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python3
VENV ?= .venv
# auto takes the CUDA build of vLLM where there is an NVIDIA GPU, else the CPU build
BUILD ?= auto

.PHONY: setup demo test test-all test-rest check site clean

setup:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --build $(BUILD)

demo: setup
	@$(VENV)/bin/fp8ext demo

# AGAIN=1: what failed runs once more, alone
test:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --build $(BUILD) --beside
	@VENV=$(VENV) $(PYTHON) scripts/test $(if $(AGAIN),--again)

# what `make test` has, and every cell of its matrices
test-all:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --build $(BUILD) --beside
	@VENV=$(VENV) $(PYTHON) scripts/test --all

# what `make test` leaves out; MINUTES: what fits, for each commit in another order
test-rest:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --build $(BUILD) --beside
	@VENV=$(VENV) $(PYTHON) scripts/test --rest $(if $(MINUTES),--minutes $(MINUTES)) $(if $(AGAIN),--again)

check: setup
	@VENV=$(VENV) scripts/check

# the pages as a site with search, in build/site; a link or anchor that leads nowhere stops it
site:
	@test -x build/site-venv/bin/mkdocs || $(PYTHON) -m venv build/site-venv
	@build/site-venv/bin/python -m pip install -q --disable-pip-version-check -r requirements/site.txt
	@PYTHONPATH=scripts NO_MKDOCS_2_WARNING=1 build/site-venv/bin/mkdocs build --strict
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Everything from a fresh clone, with nothing but Python >= 3.11 and make:
#
#   make demo        a trained MoE model reads real text under capacity ceilings
#   make test        the fast tests
#   make test-slow   the second tier; installs PyTorch, transformers and libtpu (no TPU is needed)
#   make lint        ruff: rules and format        make format    mend both
#   make types       mypy
#   make clean       remove .venv and everything that was built
#
# Options: PYTHON=python3.12   the interpreter that .venv is made with
#          WORKERS=4           processes that the tests run in
#          ARGS=...            passed on to the demo or to pytest

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

BIN := .venv/bin
# -qq hides progress and warnings; errors are still printed.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# A stamp is newer than what it was installed from, so that a second call installs nothing.
SOURCES := pyproject.toml setup.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-slow lint format types clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: .venv/installed
	@$(BIN)/cam-jax demo $(ARGS)

test: .venv/installed-test
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: .venv/installed-parity
	$(PYTEST) -m slow $(ARGS)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/installed-test
	@$(BIN)/python scripts/link_types.py
	cd .types && ../$(BIN)/python -m mypy --config-file ../pyproject.toml

clean:
	rm -rf .venv .types .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist cam_jax.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cam_jax needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	@echo "creating .venv"
	@$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/installed: .venv/created $(SOURCES)
	@echo "installing cam_jax into .venv"
	@$(INSTALL) --editable .
	@touch $@

.venv/installed-test: .venv/created $(SOURCES)
	@echo "installing cam_jax and its test tools into .venv"
	@$(INSTALL) --editable ".[test]"
	@touch .venv/installed $@

.venv/installed-parity: .venv/created $(SOURCES)
	@echo "installing cam_jax, its test tools, PyTorch, transformers and libtpu into .venv"
	@$(INSTALL) --editable ".[test,parity,tpu-plan]"
	@touch .venv/installed .venv/installed-test $@

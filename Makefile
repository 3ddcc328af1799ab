# `make train` runs the example, in a minute, `make test` every check but the long runs of
# `make test-slow` (`make lint`, `make types` and `make test-fast` a part of it), `make
# docs` writes the documentation to site/. Each first sets up what it needs in a
# virtual environment: .venv, or .venv-3.x when PYTHON names another Python; `make setup`
# does no more than that, for the tests.

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(VERSION),)
$(error $(PYTHON) does not run; name another Python with PYTHON=/path/to/python)
endif

ifeq ($(PYTHON),python3)
VENV := .venv
else
VENV := .venv-$(VERSION)
endif
BIN := $(VENV)/bin

# Which tests `make test` runs, by their markers.
MARKED ?= not slow

export JAX_PLATFORMS ?= cpu
export PIP_NO_INPUT := 1
# Packages are installed without bytecode; Python writes it where it imports them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train setup test lint types test-fast test-slow docs clean

train: $(VENV)/.installed-$(VERSION)-examples
	$(BIN)/python examples/digits.py

setup: $(VENV)/.installed-$(VERSION)-test

# mypy runs beside the tests, so that no core waits for it.
test: lint
	$(MAKE) --no-print-directory --jobs types test-fast

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy --strict jamp tests/project/typing_examples.py

test-fast: setup
	$(BIN)/pytest -n 2 --dist worksteal -m '$(MARKED)'

test-slow: setup
	$(BIN)/pytest -n 2 --dist worksteal -m slow

docs: $(VENV)/.installed-$(VERSION)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-* .jax_cache build dist *.egg-info

# The stamps carry the Python version, so a changed python3 starts a new environment.
$(VENV)/.installed-$(VERSION)-%: pyproject.toml | $(BIN)/python$(VERSION)
	$(BIN)/python -m pip install --no-compile --editable '.[$*]'
	touch $@

$(BIN)/python$(VERSION):
	$(PYTHON) -m venv --clear $(VENV)

.DELETE_ON_ERROR:

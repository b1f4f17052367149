# The few things one does here. Everything happens in .venv; `make PYTHON=python3.12 test` to choose.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-unit lint clean

demo: $(INSTALLED)
	$(BIN)/p2ptrain demo

# what is compiled is kept: two processes load the tests, and those start a hundred devices
export PYTHONDONTWRITEBYTECODE :=

# one process for the tests with real devices, one after the other, and one for what computes
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

test: $(INSTALLED)
	$(PYTEST)

# less than a minute: what one runs while working
test-unit: $(INSTALLED)
	$(PYTEST) tests/unit

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,lint]'
	touch $@

clean:
	rm -rf $(VENV) build dist

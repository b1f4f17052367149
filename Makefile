# The few things one does here. Everything happens in .venv; `make PYTHON=python3.12 test` to choose.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c '' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo install test test-unit test-gpu lint docs clean

demo: $(INSTALLED)
	$(BIN)/p2ptrain demo

# p2ptrain for this user, in an environment of its own and on the PATH
PLACE ?= $(HOME)/.local/share/p2ptrain-environment
PROGRAMS ?= $(HOME)/.local/bin

install:
	$(PYTHON) -m venv --clear $(PLACE)
	$(PLACE)/bin/python -m pip install --quiet -c constraints.txt .
	mkdir -p $(PROGRAMS)
	ln -sf $(PLACE)/bin/p2ptrain $(PROGRAMS)/p2ptrain
	@command -v p2ptrain >/dev/null || echo "Log in again, or add $(PROGRAMS) to your PATH."

# what is compiled is kept: three processes load the tests, and one starts a hundred devices
export PYTHONDONTWRITEBYTECODE :=

# one process for the tests with real devices, which wait most of the time, and two that compute
PYTEST := $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder

test: $(INSTALLED)
	$(PYTEST) -n 3

# less than a minute: what one runs while working
test-unit: $(INSTALLED)
	$(PYTEST) -n 2 tests/unit

# on a device with an accelerator: some minutes; P2PTRAIN_TEST_DEVICE=twin runs the tests without one
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest tests/gpu

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/class_names.py

# the documentation as a site that works offline, in build/site; a link that leads nowhere fails
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python tools/docs_site.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,lint]'
	touch $@

clean:
	rm -rf $(VENV) build dist

# Two commands do everything on a fresh machine: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# A CPU machine gets the pinned torch; a CUDA machine with a torch of its own keeps it (see CONTRIBUTING.md).
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test quick lint clean
demo: $(VENV)/.installed
	$(BIN)/unfog train fashion --preset demo --out runs/demo --replace

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "installing torch (the first time takes a few minutes)"
	$(PIP) install -c $(CONSTRAINTS) torch
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(PIP) install -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) install -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache

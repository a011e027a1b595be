# Everything from a fresh clone: make demo, make test; and make check before a commit.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
# One BLAS thread per process: symfuse runs its own workers. What is compiled is kept, also where the shell says otherwise:
# else each worker, and each process that a test starts, compiles all of it anew.
TEST_ENV := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test test-slow check format table moved suggestions bench experiments clean

demo: $(DEMO_READY)
	$(BIN)/symfuse demo

test: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(PYTEST_ARGS)

test-slow: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

table: $(READY) moved
	$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -m contract.table

moved: $(READY)
	$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -m contract.moved

# Types that have a row are not run again; some of them: make suggestions TYPES="mamba vit"
suggestions: $(READY)
	$(TEST_ENV) $(BIN)/python -W ignore experiments/suggestions.py $(TYPES)

# Every benchmark's data are kept as it is done; some of them: make bench NAMES="attention merging"
bench: $(READY)
	$(BIN)/python benchmarks/run.py $(NAMES)
	$(BIN)/python benchmarks/run.py --write

# Rows that are there already are not made again; HF_HUB_OFFLINE is left as it is.
experiments: $(READY)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python experiments/run.py
	$(BIN)/python experiments/run.py --write

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY) $(DEMO_READY)

# What the demo needs, without test and development tools.
$(DEMO_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo]"
	touch $(DEMO_READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

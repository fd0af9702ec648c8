.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
DEMO := demo.zarr

.PHONY: help
help:  ## List what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

.venv: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch .venv

.PHONY: demo
demo: .venv  ## Record 300 steps of Gatsby and print the summary
	$(BIN)/trajstore record --preset gatsby --steps 300 --overwrite -o $(DEMO)
	$(BIN)/trajstore summary $(DEMO)

.PHONY: test
test: .venv  ## Run the tests
	$(BIN)/python -m pytest

.PHONY: check
check: .venv  ## Lint, check types and imports; change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: .venv  ## Format the code, and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: crash
crash: .venv  ## Kill recordings 200 times and more, and damage files 300 times; takes a while
	TRAJSTORE_KILLS=60 TRAJSTORE_FLIPS=300 $(BIN)/python -m pytest -q tests/crash tests/unit/trajstore/test_flips.py

.PHONY: bench
bench: .venv  ## Measure against what people use today; the first time it records for minutes
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	for name in ingest read memory overhead stress; do $(BIN)/python benchmarks/$$name.py || exit 1; done

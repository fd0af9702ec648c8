.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready-for-tests
DEMO := demo.zarr

.PHONY: help
help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# Written last: a .venv of a user, or of an installation that was stopped, has no such file.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $(READY)

.PHONY: demo
demo: $(READY)  ## Record 300 steps of Gatsby and print the summary
	$(BIN)/trajstore record --preset gatsby --steps 300 --overwrite -o $(DEMO)
	$(BIN)/trajstore summary $(DEMO)

.PHONY: test
test: $(READY)  ## Run the short tests
	$(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: test-all
test-all: $(READY)  ## Run all tests, including the long searches
	$(BIN)/python -m pytest -n auto --dist worksteal -m ''

.PHONY: oldest
oldest:  ## Test without torch, with the oldest versions that pyproject.toml allows
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/pip install -q -c constraints-oldest.txt -e '.[test]'
	.venv-oldest/bin/python -m pytest -q -n auto --dist worksteal -m 'not torch and not nightly'

.PHONY: newest
newest:  ## Test without torch, with the newest versions of everything
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/pip install -q -e '.[test]'
	.venv-newest/bin/python -m pytest -q -n auto --dist worksteal -m 'not torch and not nightly'

.PHONY: compiled
compiled: $(READY)  ## Run the short tests with loops compiled from the first number on
	TRAJSTORE_COMPILED=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: flips
flips: $(READY)  ## Flip 300 random bits in the files of runs; each must be detected or harmless
	TRAJSTORE_FLIPS=300 $(BIN)/python -m pytest -q -m '' tests/property/test_damaged_runs.py -k flipped

.PHONY: fuzz
fuzz: $(READY)  ## Import 100,000 damaged files, open 5,000 damaged runs with each command: errors or runs
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	TRAJSTORE_METADATA=5000 $(BIN)/python -m pytest -q -s -m '' tests/property/test_damaged_runs.py -k metadata_are_errors
	TRAJSTORE_FUZZ=100000 $(BIN)/python -m pytest -q -n auto -m '' tests/property/test_exchange.py

.PHONY: loops
loops: $(READY)  ## Judge recordings of all training loops, and of 1,000 random ones; minutes
	TRAJSTORE_LOOPS=1000 $(BIN)/python -m pytest -q -m '' tests/loops

.PHONY: states
states: $(READY)  ## Compare states at four steps, and replays of each optimizer in each form of a run; minutes
	TRAJSTORE_STATES=4 $(BIN)/python -m pytest -q -n auto -m '' tests/property/test_states.py \
		tests/property/test_optimizer_steps.py

.PHONY: browser
browser: $(READY)  ## Test the page of `trajstore explore` in Chromium, as `chromium`
	$(BIN)/python tools/explore_in_browser.py

.PHONY: check
check: $(READY)  ## Lint, check types and imports, build the site; change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m sphinx -q -W --keep-going -j auto docs docs/_build

.PHONY: docs
docs: $(READY)  ## Build the site of docs/ into docs/_build; warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going -j auto docs docs/_build

.PHONY: reference
reference: $(READY)  ## Write the parts of docs/reference that come from docstrings, help and tables
	$(BIN)/python tools/reference.py

.PHONY: map
map: $(READY)  ## Print the import layers of the packages of each package
	$(BIN)/python tools/map.py

.PHONY: format
format: $(READY)  ## Format the code, and apply the linter's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: crash
crash: $(READY)  ## Kill writers and trainings more than 200 times while readers read
	TRAJSTORE_KILLS=40 $(BIN)/python -m pytest -q -m '' tests/crash

.PHONY: faults
faults: $(READY)  ## Inject failing system calls (EIO, ENOSPC, EMFILE, EROFS) into every command; minutes
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	$(BIN)/python tools/faults.py

.PHONY: known-faults
known-faults: $(READY)  ## Put 120 known faults into the code, one at a time; tests must find each; an hour
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	$(BIN)/python tools/known_faults.py

.PHONY: powerloss
powerloss: $(READY)  ## Simulate a loss of power at each call of every command that writes, for minutes
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	$(BIN)/python tools/powerloss.py --no-fsync

.PHONY: soak
soak: $(READY)  ## Kill writing commands at random times while four readers read; minutes
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	$(BIN)/python tools/soak.py

.PHONY: hostile
hostile: $(READY)  ## Run commands on malicious stores and files; measure seconds, memory, messages
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	$(BIN)/python tools/hostile.py

.PHONY: device
device: $(READY)  ## Check the recorder on a GPU or a Mac; print tables to paste into an issue
	$(BIN)/python tools/device.py

.PHONY: bench
bench: $(READY)  ## Run the benchmarks; the first run records for minutes
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	for name in ingest object_store size read memory verify overhead stress analysis exchange seen; do \
		$(BIN)/python benchmarks/$$name.py || exit 1; \
	done

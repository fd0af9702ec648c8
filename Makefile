.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
DEMO := demo.zarr

.PHONY: help
help:  ## List what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

.venv: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch .venv

.PHONY: demo
demo: .venv  ## Record 300 steps of Gatsby and print the summary
	$(BIN)/trajstore record --preset gatsby --steps 300 --overwrite -o $(DEMO)
	$(BIN)/trajstore summary $(DEMO)

.PHONY: test
test: .venv  ## Run the tests, without the long searches
	$(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: test-all
test-all: .venv  ## Run all tests, with the long searches
	$(BIN)/python -m pytest -n auto --dist worksteal -m ''

.PHONY: oldest
oldest:  ## Test without torch, with the oldest versions that pyproject.toml allows
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/pip install -q -c constraints-oldest.txt -e '.[test]'
	.venv-oldest/bin/python -m pytest -q -n auto --dist worksteal -m 'not torch and not nightly'

.PHONY: newest
newest:  ## Test without torch, with the newest of everything: what the next release will break
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/pip install -q -e '.[test]'
	.venv-newest/bin/python -m pytest -q -n auto --dist worksteal -m 'not torch and not nightly'

.PHONY: flips
flips: .venv  ## Flip 300 random bits in the files of runs; each must be found, or harmless
	TRAJSTORE_FLIPS=300 $(BIN)/python -m pytest -q -m '' tests/unit/trajstore/integrity/test_verify_flips.py

.PHONY: fuzz
fuzz: .venv  ## Import 100,000 damaged files; each is an error or a run, within the memory of its size
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	TRAJSTORE_FUZZ=100000 $(BIN)/python -m pytest -q -n auto -m '' tests/property/test_exchange_fuzz.py

.PHONY: objects
objects: .venv  ## Record 1,000 steps of Gatsby to S3 on loopback, with faults, kill it, resume, verify
	TRAJSTORE_OBJECTS=1000 $(BIN)/python -m pytest -q -s -m '' tests/integration/test_object_stores_story.py

.PHONY: browser
browser: .venv  ## Look at the page of `trajstore explore` in Chromium, as `chromium`
	TRAJSTORE_BROWSER=1 $(BIN)/python -m pytest -q -m '' tests/integration/test_explore_page.py

.PHONY: check
check: .venv  ## Lint, check types and imports, build the site; change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m sphinx -q -W --keep-going -j auto docs docs/_build

.PHONY: docs
docs: .venv  ## Build the site of docs/ into docs/_build; whatever is wrong with a page is an error
	$(BIN)/python -m sphinx -q -W --keep-going -j auto docs docs/_build

.PHONY: map
map: .venv  ## Print the rooms of each package, floor by floor, as the imports have them
	$(BIN)/python tools/map.py

.PHONY: format
format: .venv  ## Format the code, and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: crash
crash: .venv  ## Kill writers and trainings 200 times and more, with readers looking on
	TRAJSTORE_KILLS=40 $(BIN)/python -m pytest -q -m '' tests/crash

.PHONY: faults
faults: .venv  ## Have the system refuse calls of every command (EIO, ENOSPC, EMFILE, EROFS), for minutes
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	$(BIN)/python tools/faults.py

.PHONY: powerloss
powerloss: .venv  ## Simulate a loss of power at each call of every command that writes, for minutes
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	$(BIN)/python tools/powerloss.py --no-fsync

.PHONY: soak
soak: .venv  ## Kill commands that write, at random times, with four readers looking on, for minutes
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	$(BIN)/python tools/soak.py

.PHONY: hostile
hostile: .venv  ## Give commands stores and files made to do harm: seconds, memory, and what they say
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	$(BIN)/python tools/hostile.py

.PHONY: bench
bench: .venv  ## Measure against what people use today; the first time it records for minutes
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,hdf5]'
	for name in ingest object_store size read memory verify overhead stress analysis exchange seen; do \
		$(BIN)/python benchmarks/$$name.py || exit 1; \
	done

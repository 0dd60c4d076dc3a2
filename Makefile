# make quickstart: install and run a small sweep on bundled data.
# make test: install and run the tests. make quicktest: only the fast ones. make test-all: the slow ones, too.
# make lint: check style and types.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: quickstart quicktest test test-all lint clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python -m ubar_jax.experiments.sweep --flagfile=experiments/quickstart.flags

quicktest: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "not slow and not medium"

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "not slow"

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist=worksteal

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) results

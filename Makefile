# make quickstart: install and run a small sweep on bundled data.
# make test: install and run the tests. make quicktest: only the fast ones. make test-all: the slow ones, too.
# make test-oldest, make test-colab: the fast tests, all tests of rules and attacks and those of downloads, with the
# lowest allowed versions on Python 3.11, and with the versions of Colab (August 2026) on Python 3.13.
# make lint: check style and types. make wheel: build dist/*.whl and dist/*.tar.gz.
# make reproduce: run and draw the paper's figures, nine hours on two cores; FIGURE=gaussian for one of them.
# make notebooks: execute the notebooks and write them with their outputs.
PYTHON ?= python3
PYTHON311 ?= python3.11
PYTHON313 ?= python3.13
VENV ?= .venv
WORKERS ?= $(shell nproc)
PROFILE ?= cpu
BIN = $(VENV)/bin

INSTALL = -m pip install --quiet --disable-pip-version-check
FAST = -m pytest -n 2 --dist=worksteal -m "not slow and not medium"
CONTRACTS = -m pytest -n 2 --dist=worksteal -m "slow or medium" \
  tests/parts/test_rules.py tests/parts/test_attacks.py tests/parts/test_download.py

.PHONY: quickstart quicktest test test-all test-oldest test-colab lint wheel notebooks reproduce clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -e '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python -m ubar_jax.experiments.sweep --flagfile=experiments/quickstart.flags

quicktest: $(VENV)/.installed
	$(BIN)/python $(FAST)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "not slow"

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist=worksteal

# They may compute wrong numbers, so all tests that compare with the NumPy references run.
test-oldest: $(VENV)-oldest/.installed
	$(VENV)-oldest/bin/python $(FAST)
	$(VENV)-oldest/bin/python $(CONTRACTS)

test-colab: $(VENV)-colab/.installed
	$(VENV)-colab/bin/python $(FAST)
	$(VENV)-colab/bin/python $(CONTRACTS)

$(VENV)-oldest/.installed: pyproject.toml
	$(PYTHON311) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python .ci/lowest > $(VENV)-oldest/lowest.txt
	$(VENV)-oldest/bin/python $(INSTALL) --constraint $(VENV)-oldest/lowest.txt -e '.[dev]'
	touch $@

$(VENV)-colab/.installed: pyproject.toml
	$(PYTHON313) -m venv $(VENV)-colab
	$(VENV)-colab/bin/python $(INSTALL) -e '.[dev]' jax==0.7.2 jaxlib==0.7.2 flax==0.11.2
	touch $@

wheel: $(VENV)/.installed
	$(BIN)/python $(INSTALL) build
	$(BIN)/python -m build

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

reproduce: $(VENV)/.installed
	$(BIN)/python -m ubar_jax.experiments.reproduce --profile=$(PROFILE) \
	  $(if $(filter cpu,$(PROFILE)),--workers=$(WORKERS)) $(addprefix --figure=,$(FIGURE))

notebooks: $(VENV)/.installed
	$(BIN)/python experiments/notebooks/build.py

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-colab build dist results

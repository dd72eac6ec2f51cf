# Two commands matter: `make demo` answers chart questions on this machine, `make test` runs the tests.
# Both make the virtual environment first if it is not there. PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that share the tests; each takes about 4 GB.
WORKERS ?= 2
RUN_STAMP := $(VENV)/.run
DEV_STAMP := $(VENV)/.dev

.PHONY: demo test check format clean

demo: $(RUN_STAMP)
	$(BIN)/python serve.py --target demo

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --durations 20

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(RUN_STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e .
	touch $@

# z-lab's reference draft pins versions that clash with ours, so it comes without its dependencies.
$(DEV_STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	touch $@ $(RUN_STAMP)

clean:
	rm -rf $(VENV) .jax_cache .pytest_cache .ruff_cache build *.egg-info

# Two commands matter: `make demo` answers chart questions on this machine, `make test` runs the tests.
# Both make the virtual environment first if it is not there. PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that share the tests; each takes about 4 GB.
WORKERS ?= 2
RUN_STAMP := $(VENV)/.run
DEV_STAMP := $(VENV)/.dev
H200 := .venv-h200
# jax 0.11 has no Python 3.11: the first newer one that is found, pyenv's included.
PYTHON312 ?= $(firstword $(foreach one,python3 python3.12 python3.13 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python3),\
  $(shell $(one) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null && echo $(one))))

.PHONY: demo test check compiled format clean

demo: $(RUN_STAMP)
	$(BIN)/python serve.py --target demo

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --durations 20

# The decoding loop compiled for an H200, which takes no card but wheels of some 300 MB, and what the
# interpreter of Mosaic GPU does in jax 0.11 alone. Of its own: neither flags nor versions are those of
# the other tests.
compiled:
ifeq ($(PYTHON312),)
	@echo "not compiled for an H200: there is no Python 3.12; name one as PYTHON312"
else
	@test $(H200)/.done -nt pyproject.toml \
	  || { $(PYTHON312) -m venv $(H200) && $(H200)/bin/python -m pip install --quiet -e ".[h200]" \
	       && touch $(H200)/.done; } \
	  || test -e $(H200)/.done \
	  || { echo "not compiled for an H200: its compiler could not be installed"; exit 0; }; \
	JAX_PLATFORMS=cpu $(H200)/bin/python -m pytest --noconftest -o addopts=-qrs \
	  $(addprefix tests/kernels/test_,compiled_for_h200.py hopper.py likeliest.py)
endif

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
	rm -rf $(VENV) $(H200) .jax_cache .pytest_cache .ruff_cache build *.egg-info

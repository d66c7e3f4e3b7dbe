# `make demo` and `make test` set up everything they need in .venv; running them again is quick and safe.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
FLOOR_TORCH ?= torch==2.11.*
NEWEST_TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
PREPARED := $(VENV)/.prepared
# Python compiles a module when it is imported first; most of what is installed never is. What was compiled is kept: tests
# start many processes.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# The names of what the package and its extras require, a line each: torch is installed apart.
UNBOUND := import re, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	required = sum(project['optional-dependencies'].values(), project['dependencies']); \
	print(*sorted({re.split('[<>=~]', each)[0] for each in required} - {'torch'}), sep='\n')

.PHONY: demo test test-floor test-newest lint types layers check real clean FORCE

demo: $(PREPARED)
	@echo "== The embedded pair speaks; then what was measured =="
	$(BIN)/outrider generate --compare --prompt "One day, a boy named Tim went to the park with his dog. They" --temperature 0 --max-new-tokens 128

test: $(TOOLS)
	@echo "== All tests =="
	$(BIN)/python -m pytest -n auto --dist worksteal

# PyPI's build of the floor is the one with CUDA; FLOOR_TORCH may name another.
test-floor:
	@echo "== All tests on the oldest supported torch and transformers, in .venv-floor =="
	"$(PYTHON)" -m venv .venv-floor
	.venv-floor/bin/python -m pip install --quiet "$(FLOOR_TORCH)"
	.venv-floor/bin/python -m pip install --quiet "$(FLOOR_TORCH)" "transformers==5.17.*" -e ".[dev,bench,train,serve,grammar]"
	.venv-floor/bin/python -m pytest -n auto

# All libraries of all extras are the newest that the index has, also above the bounds of pyproject.toml, so that the
# package itself is installed without what it requires. PyPI's newest torch is a build with CUDA too.
test-newest:
	@echo "== All tests on the newest torch, transformers and libraries of every extra, in .venv-newest =="
	"$(PYTHON)" -m venv .venv-newest
	.venv-newest/bin/python -c "$(UNBOUND)" > .venv-newest/requirements.txt
	.venv-newest/bin/python -m pip install --quiet --upgrade "$(NEWEST_TORCH)" -r .venv-newest/requirements.txt
	.venv-newest/bin/python -m pip install --quiet --upgrade --no-deps -e .
	.venv-newest/bin/python -m pytest -n auto

lint: $(TOOLS)
	@echo "== Lint and format =="
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TOOLS)
	@echo "== Types =="
	$(BIN)/mypy

layers: $(TOOLS)
	@echo "== Layers =="
	$(BIN)/lint-imports

check: lint types layers test

# Models and environments of other engines are kept in the user's cache: some gigabytes, the first time.
real: $(TOOLS)
	@echo "== Every command once on real models: SmolLM2 and a pair of Qwen2.5-Coder; about 45 minutes on two cores =="
	$(BIN)/python -m recipes real

clean:
	rm -rf $(VENV) .venv-floor .venv-newest

# torch first and by itself: a looser requirement would fetch a build with CUDA, gigabytes of it. It is named again
# beside the rest, without its pin, so that `make TORCH=...` is kept.
$(READY): pyproject.toml constraints.txt $(VENV)/.torch
	@echo "== Setting up $(VENV) with $(TORCH); the first time takes a few minutes =="
	test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV)
	$(PIP) "$(TORCH)"
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) -c $(VENV)/constraints.txt "$(TORCH)" -e .
	@touch $@

# The fastest forwards of this machine, and what steps cost with them. Without a C++ compiler the demo runs all the same.
$(PREPARED): $(READY)
	@echo "== Compiling the embedded pair for this machine and timing its steps; a minute or two, once =="
	$(BIN)/outrider prepare || echo "The demo goes on without compiled forwards."
	@touch $@

# What the demo can do without: tools, tests, grammars.
$(TOOLS): $(READY)
	@echo "== Adding tools and what tests need =="
	$(PIP) -c $(VENV)/constraints.txt "$(TORCH)" -e ".[dev,bench,train,serve,grammar]"
	@touch $@

# Changes only when another torch is asked for, so that a change of TORCH is a new set-up.
$(VENV)/.torch: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

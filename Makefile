# make demo | make train | make test | make test-all | make lint | make docs. Each creates .venv and installs when needed; PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

# Many container images set it: each process would then compile all that it imports, 9 s of it torch's.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo train test test-all lint docs clean

demo: .venv/demo
	$(BIN)/python -m benchmarks extension $(ARGS)

train: .venv/installed
	$(BIN)/python train.py sample_every=100 $(ARGS)

test: .venv/tested
	$(BIN)/python -m pytest -n 2 -m 'not slow' $(ARGS)

test-all: .venv/tested
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: .venv/tested
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: .venv/tested
	$(BIN)/python -m mkdocs build --strict --quiet

define install
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else f"longctx needs Python 3.11 to 3.13, not {v.major}.{v.minor}: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '$(1)'
	touch .venv/installed $@
endef

.venv/installed: pyproject.toml constraints.txt
	$(call install,.)

.venv/demo: pyproject.toml constraints.txt
	$(call install,.[demo])

.venv/tested: pyproject.toml constraints.txt
	$(call install,.[test])

clean:
	rm -rf .venv

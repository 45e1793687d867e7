# Two commands matter to a user: `make demo` and `make test`. Each installs what it needs.
# Everything that is installed lives in .venv and in $(XDG_CACHE_HOME)/pd-sidecar, nowhere else.
PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3))
VENV   := .venv
PY     := $(VENV)/bin/python

.PHONY: demo test test-fast chart-test image lint format bench latency decide soak faults lock docs clean

demo: $(VENV)/.ready
	@$(PY) -m e2e.demo

test: lint
	@FUZZ_SECONDS=60 $(PY) -m tests.run all

test-fast: lint
	@$(PY) -m tests.run fast

chart-test: $(VENV)/.ready
	@$(PY) -m tests.run chart

lint: $(VENV)/.ready
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

format: $(VENV)/.ready
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

bench: $(VENV)/.ready
	@$(PY) -m e2e.bench

latency: $(VENV)/.ready
	@$(PY) -m e2e.latency $(ARGS)

decide: $(VENV)/.ready
	@$(PY) -m e2e.decide $(ARGS)

soak: $(VENV)/.ready
	@$(PY) -m e2e.soak $(ARGS)

faults: $(VENV)/.ready
	@$(PY) -m e2e.faults $(ARGS)

docs: $(VENV)/.ready
	@$(PY) -m docs.generate

lock: $(VENV)/.ready
	@$(VENV)/bin/uv pip compile --quiet --universal --no-annotate --no-header --generate-hashes --python-version 3.11 pyproject.toml -o requirements.lock
	@$(VENV)/bin/uv pip compile --quiet --universal --no-annotate --no-header --generate-hashes --python-version 3.11 pyproject.toml --group dev -o requirements-dev.lock

# The image: BASE must hold the Python that IMAGE_PYTHON names. `make image BUILDER="buildah build --isolation chroot"`
IMAGE_PYTHON  ?= 3.12
IMAGE_MACHINE ?= x86_64
BASE          ?= docker.io/library/python:$(IMAGE_PYTHON)-slim
BUILDER       ?= docker build
VERSION        = $(shell sed -n 's/__version__ = "\(.*\)"/\1/p' sidecar/__init__.py)
IMAGE         ?= pd-sidecar:$(VERSION)

image: $(VENV)/.ready
	@$(PY) -m image.tree --python $(IMAGE_PYTHON) --machine $(IMAGE_MACHINE)
	@$(BUILDER) --file Containerfile --build-arg BASE=$(BASE) --build-arg VERSION=$(VERSION) --tag $(IMAGE) .

$(VENV)/.ready: requirements-dev.lock pyproject.toml
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "make: needs Python 3.11 to 3.13, not $(or $(PYTHON),none): name one with PYTHON=" >&2; exit 1; }
	@echo "installing the tools into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info

# The commands of this repository. `make run` and `make test` need only Python 3.11+ and make; they set up the rest.
PYTHON ?= python3
VENV ?= .venv
# Another wheel index to install from as well. Where pip's default torch would bring CUDA, name PyTorch's CPU index.
WHEEL_INDEX ?=
BIN := $(VENV)/bin
# Every process of a test or a cluster would compile this tree anew.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(PATH):$(CURDIR)/$(VENV)/prometheus/usr/bin
SCHEMAS := @kubernetes-models/keda@2.0.0 @kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/gateway-api@2.0.0
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(if $(WHEEL_INDEX),--extra-index-url $(WHEEL_INDEX))
STUBS := clients/python/tandem_client/stubs
PROTOC := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos

.DEFAULT_GOAL := help
.PHONY: help run test fast check test-gpu gpu-bundle chaos soak lint protos bench plot docs lock pin chart-lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/run.stamp ## serve the demo model on CPU: Redis, gateway, prefill, decode; one that talks: MODEL=smollm2
	@$(BIN)/tandem up $(MODEL) --sample "$(if $(MODEL),Once upon a time,import )" $(ARGS)

# One room's tests alone: make test ROOM=transfer
ROOM_TESTS = $(if $(ROOM),$(wildcard tests/$(ROOM) tests/test_$(ROOM).py))

test: $(VENV)/dev.stamp $(VENV)/schemas.stamp $(VENV)/prometheus.stamp ## the tests, on real parts; one room's: ROOM=transfer
	@$(BIN)/python -m tests.gate -n 3 --dist loadfile --no-loadscope-reorder --durations=10 -m "not long and not alone" $(ROOM_TESTS) $(ARGS)

fast: $(VENV)/dev.stamp ## what needs no process and no weights, in a minute
	@$(BIN)/python -m pytest -q -p tests.fast -m fast $$(grep -rlE 'mark\.fast' tests --include='test_*.py') $(ARGS)

check: $(VENV)/dev.stamp $(VENV)/schemas.stamp $(VENV)/prometheus.stamp ## what takes long, in parts of 15 minutes: PART=chaos; which there are: CONTRIBUTING.md
	@$(BIN)/python -m tests.check $(PART)

test-gpu: $(VENV)/dev.stamp ## what needs a CUDA device, which it names where there is none; then what that device gives, as JSON
	@$(BIN)/python -m pytest -q -rs tests/gpu $(ARGS)
	@$(BIN)/python -m benchmarks.gpu

gpu-bundle: $(VENV)/dev.stamp ## wheels for a GPU without network, in build/gpu-bundle; there: python3 benchmarks/gpu/bare.py BUNDLE
	@$(BIN)/python -m benchmarks.gpu.bundle $(ARGS)

chaos: $(VENV)/dev.stamp ## N seeded schedules of faults over the whole cluster's code (N=100000)
	@$(BIN)/python -m tests.chaos.explorer $(or $(N),100000) $(ARGS)

soak: $(VENV)/dev.stamp ## a rolling restart; then MINUTES of traffic on real processes whose workers are replaced (MINUTES=30)
	@$(BIN)/python -m pytest -n0 tests/chaos/rolling_restart.py
	@$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),30) $(ARGS)

lint: $(VENV)/dev.stamp ## ruff, mypy, buf (style and breaking changes)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --num-workers 2
	@$(BIN)/buf lint
	@if git rev-parse --verify --quiet main:protos >/dev/null; then $(BIN)/buf breaking --against '.git#branch=main'; fi

protos: $(VENV)/dev.stamp ## regenerate tandem/v1 from protos/
	@$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=quiet:. protos/tandem/v1/*.proto
	@$(PROTOC) --python_out=$(STUBS) --pyi_out=$(STUBS) protos/tandem/v1/llm.proto
	@$(PROTOC) -I clients/python --python_out=clients/python --pyi_out=clients/python $(STUBS)/error_details.proto

bench: $(VENV)/dev.stamp ## run the benchmarks whose figures the README quotes
	@$(BIN)/python -m benchmarks.serving $(ARGS)

plot: $(VENV)/dev.stamp ## draw the benchmarks' last results as PNG
	@$(BIN)/python -m benchmarks.chart

docs: $(VENV)/dev.stamp ## regenerate docs/settings.md, metrics.md, the values table, the settings schema, dashboards
	@$(BIN)/python -m deploy.generate
	@$(BIN)/python -m deploy.dashboards

lock: $(VENV)/dev.stamp ## the wheels of every image by version and hash, anew: deploy/docker/locks
	@$(if $(WHEEL_INDEX),PIP_EXTRA_INDEX_URL=$(WHEEL_INDEX) )$(BIN)/python -m deploy.docker.lock

pin: $(VENV)/dev.stamp ## the images that ours are built on, by the digest that their tags have now: a release begins with it (skopeo)
	@$(BIN)/python -m deploy.docker.pin

chart-lint: $(VENV)/dev.stamp $(VENV)/schemas.stamp ## the Helm chart alone: render, validate, check, and run its pods
	@$(BIN)/python -m pytest -q tests/helm $(ARGS)

clean: ## remove what the other commands made
	@rm -rf $(VENV) .run build benchmarks/out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/python.stamp:
	@echo "setting up $(VENV) (once): some 70 packages, PyTorch among them; a minute or more"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tandem needs Python 3.11 or newer: make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/run.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	@$(PIP) --editable '.[gateway,worker,local]' --editable clients/python
	-@command -v gcc >/dev/null || command -v clang >/dev/null || $(PIP) ziglang  # a C compiler, for the kernels
	@touch $@

# All that `make run` needs is among it, so that a fresh clone installs once.
$(VENV)/dev.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	@$(PIP) --editable '.[gateway,worker,local,loader,dev]' --editable clients/python
	@touch $(VENV)/run.stamp $@

# Prometheus and promtool, from Debian's archive without installing them; where neither is to be had, tests that need
# them are skipped and say so.
$(VENV)/prometheus.stamp: $(VENV)/python.stamp
	-@command -v prometheus >/dev/null || (mkdir -p $(VENV)/prometheus && cd $(VENV)/prometheus && \
	  apt-get download -q prometheus >/dev/null && dpkg -x prometheus_*.deb . && rm prometheus_*.deb)
	@touch $@

# The schemas of Kubernetes operators, which only npm has; where there is no npm, their tests are skipped and say so.
$(VENV)/schemas.stamp: $(VENV)/python.stamp
	-@command -v npm >/dev/null && npm install --prefix $(VENV)/schemas --silent --no-audit --no-fund --ignore-scripts $(SCHEMAS)
	@touch $@

# make setup && make run: from a fresh clone to a chosen, registered, deployable model.
#
# Torch: the build that suits this machine is chosen by uv. To choose yourself:
#   make setup TORCH=cpu        make setup TORCH=cu128        (any backend that uv's --torch-backend takes)
# Where ../shared/wheels exists, the CPU build there is taken instead.

PYTHON ?= python3
TORCH ?= auto
RECIPE ?= recipes/quickstart.yaml
FAMILIES ?= cpu client
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
WHEELS := $(wildcard ../shared/wheels)

ifeq ($(WHEELS),)
TORCH_FROM := --torch-backend=$(TORCH)
else
TORCH_FROM := --find-links $(WHEELS) --constraint $(WHEELS)/constraints.txt
endif

.PHONY: help setup run test test-cluster images kind-up kind-down mlflow measure lock clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(VENV)/.ready ## install everything into .venv

$(VENV)/.ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than 3.11 -> make setup PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "error: no virtual environment -> apt install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8'
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps --require-hashes -r requirements.lock
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python $(TORCH_FROM) 'torch>=2.8'
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps --editable .
	@touch $@

run: setup ## run the quickstart, or RECIPE=recipes/resnet18.yaml
	$(BIN)/hpml run $(RECIPE)

test: setup ## lint, types and tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy components pipelines
	$(BIN)/shellcheck .ci/run docker/build docker/lock docker/install-locked docker/install-code k8s/make-secrets \
	  k8s/kind/up k8s/kind/down tests/cluster/images tests/cluster/run
	$(BIN)/hadolint docker/Dockerfile tests/cluster/moto.Dockerfile
	$(BIN)/pytest

test-cluster: setup ## the tests on a cluster: KUBECONFIG says which; see docs/cluster.md
	HPML_TEST_CLUSTER=yes $(BIN)/pytest --durations 30 tests/docker tests/cluster

images: ## build the images FAMILIES="cpu client" of docker/, by docker, podman or buildah
	docker/build $(FAMILIES)

kind-up: images ## a kind cluster with Kubeflow Pipelines, the training operator, MLflow and a store
	k8s/kind/up

kind-down: ## remove it
	k8s/kind/down

mlflow: setup ## serve the MLflow page of the runs on this machine, at port 5000
	MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=1 $(BIN)/mlflow ui --backend-store-uri sqlite:///runs/mlflow.db

measure: setup ## what the command itself costs; after make run
	$(BIN)/python tests/measure_overheads.py

lock: setup ## resolve the dependencies anew (torch is chosen per machine, so it is not in the lock)
	$(UV) pip compile pyproject.toml --extra stages --extra data --extra dev --universal --upgrade \
	  --python-version 3.11 $(if $(WHEELS),$(TORCH_FROM),--torch-backend=cpu) --no-emit-index-url --no-emit-find-links \
	  --no-emit-package torch --generate-hashes --no-annotate --no-header --quiet -o requirements.lock
	UV=$(UV) docker/lock $(if $(WHEELS),$(TORCH_FROM),--torch-backend=cpu)

clean: ## remove the environment, keep the runs
	rm -rf $(VENV) build dist *.egg-info

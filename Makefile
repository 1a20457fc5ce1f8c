# make setup && make run: from a fresh clone to a chosen, registered, deployable model.
#
# Torch: uv chooses the build that suits this machine, from torch's own index. To choose yourself:
#   make setup TORCH=cpu        make setup TORCH=cu128        (any backend that uv's --torch-backend takes)
# Where that index cannot be reached, pip installs torch from wherever pip is configured to look.
# Where ../shared/wheels exists, the CPU build there is taken instead.

PYTHON ?= python3
TORCH ?= auto
RECIPE ?= recipes/quickstart.yaml
FAMILIES ?= cpu client
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
SIDE_BY_SIDE := $(BIN)/pytest --numprocesses logical --dist loadfile --no-loadscope-reorder
ALONE := $(BIN)/pytest $(shell grep -rl --include=test_*.py 'mark\.alone' tests)
WHEELS := $(wildcard ../shared/wheels)

ifeq ($(WHEELS),)
TORCH_FROM := --torch-backend=$(TORCH)
else
TORCH_FROM := --find-links $(WHEELS) --constraint $(WHEELS)/constraints.txt
endif

WITH_UV := $(UV) pip install --quiet --compile-bytecode --python $(BIN)/python
WITH_PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# uv does not read pip's configuration, and a company's mirror is often named only there.
install = $(WITH_UV) $(1) || { echo "note: uv could not install this -> trying pip, with its own configuration" >&2; \
	  $(WITH_PIP) $(1); }

.PHONY: help setup torch run lint test test-slow test-all test-cluster test-cluster-kills test-deploy-kills \
  test-gpu images kind-up kind-down mlflow measure measure-noise measure-states measure-bursts \
  measure-large-dataset measure-serving test-kserve-client fuzz-serving lock clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

setup: $(VENV)/.ready ## install everything into .venv

$(VENV)/.ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than 3.11 -> make setup PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "error: no virtual environment -> apt install python3-venv" >&2; exit 2; }
	$(WITH_PIP) 'uv>=0.8'
	@$(call install,--no-deps --require-hashes -r requirements.lock)
	@$(MAKE) --no-print-directory torch
	@$(call install,--no-deps --editable .)
	@touch $@

torch: # a part of setup
	@$(WITH_UV) $(TORCH_FROM) 'torch>=2.8' || { \
	  if [ '$(TORCH)' != auto ]; then \
	    echo "error: no torch for TORCH=$(TORCH) -> make setup takes what pip finds, often a larger build" >&2; exit 2; \
	  fi; \
	  echo "note: no torch from its own index -> pip looks where it is configured to: by default PyPI, whose build" \
	    "is for CUDA and takes 6.7 GB installed with NVIDIA's libraries" >&2; \
	  $(WITH_PIP) 'torch>=2.8' || { echo "error: pip finds no torch -> name a folder with its wheel:" \
	    "make setup TORCH_FROM='--find-links DIR'" >&2; exit 2; }; }

run: setup ## run the quickstart, or RECIPE=recipes/resnet18.yaml
	$(BIN)/hpml run $(RECIPE)

test: lint ## lint, types, and the tests that are not slow: some minutes
	$(SIDE_BY_SIDE) -m "not slow and not alone"
	$(ALONE) -m "alone and not slow"

test-slow: setup ## the tests that `make test` leaves out; names the twenty that take longest
	$(SIDE_BY_SIDE) --durations 20 -m "slow and not alone"
	$(ALONE) -m "alone and slow"

test-all: lint ## lint, types, and every test that runs on this machine, in one go: what they share is made once
	$(SIDE_BY_SIDE) --durations 20 -m "not alone"
	$(ALONE) -m "alone"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hpml
	$(BIN)/shellcheck .ci/run docker/build docker/lock docker/install-locked docker/install-code k8s/make-secrets \
	  k8s/kind/up k8s/kind/down tests/cluster/images tests/cluster/run
	$(BIN)/hadolint docker/Dockerfile tests/cluster/moto.Dockerfile

test-cluster: setup ## the tests on a cluster: KUBECONFIG says which; see docs/cluster.md
	HPML_TEST_CLUSTER=yes $(BIN)/pytest --durations 20 tests/docker/test_images.py tests/cluster

test-cluster-kills: setup ## a worker of 20 trainings on that cluster is killed, deleted or evicted: 20 finishes?
	HPML_TEST_CLUSTER=yes HPML_TEST_KILLS=20 $(BIN)/pytest -o faulthandler_timeout=0 tests/cluster/test_pytorchjob.py -k as_many_finishes_as_kills

test-deploy-kills: setup ## 20 rollouts on that cluster are killed: is the next one right, and did no request fail?
	HPML_TEST_CLUSTER=yes HPML_TEST_DEPLOY_KILLS=20 $(BIN)/pytest -o faulthandler_timeout=0 tests/cluster/test_deploy.py -k killed_at_random

test-gpu: ## what the GPU path does on this machine, without a set-up: PYTHON=python3 with torch and numpy
	@$(PYTHON) tests/gpu

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

measure-noise: setup ## is a run ever without a result, or with a wrong one? hours, to be stopped at will; after make run
	$(BIN)/python -m tests.measure_noise

measure-states: setup ## why rounds disagree: spinning threads, the distance of the cores; after make run
	$(BIN)/python -m tests.measure_states --threads 2
	$(BIN)/python -m tests.measure_states --threads 1

measure-bursts: setup ## what bursts of other processes leave behind in the requests between them; after make run
	$(BIN)/python -m tests.measure_bursts
	$(BIN)/python -m tests.measure_bursts --settling-ms 0

measure-large-dataset: setup ## what 8 GB of pictures take in a control group of 1.5 GiB; as root
	$(BIN)/python -m tests.measure_large_dataset

measure-serving: setup ## what hpml serve costs above its engine, and others beside it; after make run; PyPI for these
	for peer in kserve mlserver litserve bentoml; do \
	  [ -x runs/.serving-peers/$$peer/bin/python ] || { $(UV) venv -q runs/.serving-peers/$$peer \
	    && $(UV) pip install -q --python runs/.serving-peers/$$peer/bin/python $$peer onnxruntime; } || exit 1; \
	done
	$(BIN)/python -m tests.measure_serving runs/latest/bundle

test-kserve-client: setup ## KServe's own clients ask hpml serve; PyPI for these
	[ -x runs/.serving-peers/kserve/bin/python ] || { $(UV) venv -q runs/.serving-peers/kserve \
	  && $(UV) pip install -q --python runs/.serving-peers/kserve/bin/python kserve onnxruntime; }
	$(BIN)/pytest tests/serving/test_kserve_client.py

fuzz-serving: setup ## 100,000 requests that no client should send, to hpml serve; after make run
	$(BIN)/python -m tests.fuzz_serving runs/latest/bundle

lock: setup ## resolve the dependencies anew (torch is chosen per machine, so it is not in the lock)
	$(UV) pip compile pyproject.toml --extra stages --extra data --extra dev --universal --upgrade \
	  --python-version 3.11 $(if $(WHEELS),$(TORCH_FROM),--torch-backend=cpu) --no-emit-index-url --no-emit-find-links \
	  --no-emit-package torch --no-emit-package openvino-telemetry --generate-hashes --no-annotate --no-header --quiet \
	  -o requirements.lock
	UV=$(UV) docker/lock $(if $(WHEELS),$(TORCH_FROM),--torch-backend=cpu)

clean: ## remove the environment, keep the runs
	rm -rf $(VENV) build dist *.egg-info

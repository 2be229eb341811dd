# Everything runs in .venv, which is made on first use. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
# Passed through to `python -m venv` (--system-site-packages keeps the torch of a training image) and to `pip install`.
VENV_ARGS ?=
PIP_ARGS ?=
COMPARE_ARGS ?=
BENCH_ARGS ?=
# verl and TRL as contenders of `make bench`, in a folder of their own: `make bench-contenders`. slime's and NeMo-RL's
# own code takes part from checkouts: make bench SLIME_SRC=... NEMO_RL_SRC=...
BENCH_PACKAGES ?= .venv-bench
# The SGLang server lives in an environment of its own.
SGLANG_VENV ?= .venv-sglang
# So does verl, for the tests that compare with it, and once more next to SGLang's server, where its whole trainer runs.
VERL_VENV ?= .venv-verl
VERL_WHOLE_VENV ?= .venv-verl-whole
# And the whole trainers of slime, miles and Megatron-LM RL, and that of NeMo-RL, from checkouts: docs/trainers.md.
SLIME_VENV ?= .venv-slime
NEMO_RL_VENV ?= .venv-nemo-rl
# And TRL from PyPI, prime-rl and SkyRL from checkouts, in one for the three.
DOORS_VENV ?= .venv-doors
PRIME_RL_SRC ?=
SKYRL_SRC ?=
SLIME_SRC ?=
MILES_SRC ?=
MEGATRON_SRC ?=
NEMO_RL_SRC ?=
# For their pytest: -k "algorithm and 3" runs what is named so, and starts no other run; slime's -k misspelt is one.
TRAINER_ARGS ?=
# Two pytest processes, file by file: the slow tests launch two to four processes themselves, so more are not faster.
# The order of the files is that of tests/conftest.py: the longest first.
PYTEST_ARGS ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2> /dev/null),,ci/constraints-cpu.txt)
PIP_INSTALL = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check \
	$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) $(PIP_ARGS)

# More OpenMP threads than cores make the tests with several processes many times slower.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Trainers as a whole: those of a checkout say that they are not run where it is not named.
WHOLE_OF_SOURCES := test-slime test-miles test-megatron-rl test-nemo-rl test-prime-rl test-skyrl
WHOLE_OF_PACKAGES := test-verl-whole test-trl
.PHONY: help bench bench-contenders compare compare-sglang gpu test test-all test-sglang test-verl test-sources wheel \
	$(WHOLE_OF_SOURCES) $(WHOLE_OF_PACKAGES) sglang lint format docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)$$/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 26
	@echo "  variables: PYTHON=$(PYTHON) VENV=$(VENV) SGLANG_VENV=$(SGLANG_VENV) VERL_VENV=$(VERL_VENV) VERL_WHOLE_VENV=$(VERL_WHOLE_VENV) SLIME_VENV=$(SLIME_VENV) NEMO_RL_VENV=$(NEMO_RL_VENV) VENV_ARGS= PIP_ARGS= COMPARE_ARGS= BENCH_ARGS= TRAINER_ARGS=" \
		"PYTEST_ARGS='$(PYTEST_ARGS)'"

compare: $(VENV)/.test  ## train under each algorithm and mismatch; writes runs/compare/report.html, goes on where it stopped
	$(BIN)/mismatch-plugin compare --resume $(COMPARE_ARGS)

bench: $(VENV)/.test  ## what the plugin costs next to what else there is; writes runs/bench/bench.md and bench.json
	PYTHONPATH="$(abspath $(BENCH_PACKAGES))$${PYTHONPATH:+:$$PYTHONPATH}" $(foreach source,SLIME_SRC NEMO_RL_SRC,\
		$(if $($(source)),$(source)="$(abspath $($(source)))")) $(BIN)/python -m examples.benchmarks.bench $(BENCH_ARGS)

bench-contenders: $(VENV)/.test  ## verl and TRL for `make bench` (a folder of 400 MB, 110 MB to download)
	$(PIP_INSTALL) --no-deps --upgrade --target "$(BENCH_PACKAGES)" --requirement ci/bench_packages.txt

gpu: $(VENV)/.test  ## on a CUDA device: check the log-prob kernels, measure, one step of megatron-core; writes runs/gpu/gpu.json
	$(BIN)/python -m examples.benchmarks.gpu $(BENCH_ARGS)

test: $(VENV)/.test $(VENV)/.peers  ## the quick suite, five minutes on two cores (makes .venv on first use)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# MISMATCH_FULL: whole matrices and tables, of which `make test` runs a part (tests/full.py). Hosts' real source takes part
# where MISMATCH_HOST_SRC names a folder of checkouts (docs/hosts.md).
test-all: export MISMATCH_FULL = 1
test-all:  ## every test: whole matrices, SGLang, verl, wheel, whole trainers (10 GB of environments; hours)
	@failed=0; for target in test test-sglang test-verl wheel $(WHOLE_OF_PACKAGES) $(WHOLE_OF_SOURCES); do \
		$(MAKE) $$target || failed=1; \
	done; exit $$failed

test-sources: $(WHOLE_OF_SOURCES)  ## whole trainers whose sources are named: slime, miles, Megatron-LM, NeMo-RL, prime-rl, SkyRL

wheel:  ## build the wheel, and install and use it in an empty environment
	PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" ci/wheel.sh

test-sglang compare-sglang: export MISMATCH_SGLANG_PYTHON = $(abspath $(SGLANG_VENV))/bin/python

sglang:  ## make .venv-sglang, where SGLang serves on CPU (2.6 GB, made on first use)
	@PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" ci/sglang_cpu.sh $(SGLANG_VENV)

test-sglang: sglang $(VENV)/.test  ## run the tests against a real SGLang server (makes both environments on first use)
	$(BIN)/python -m pytest tests/sglang

compare-sglang: sglang $(VENV)/.test  ## algorithm 0 and token weights through megatron-core on an SGLang server; prints a table
	$(BIN)/python -W ignore -m examples.megatron_core.train --use-tis --tis-level token $(COMPARE_ARGS)

test-verl:  ## run the tests against verl itself, in an environment of its own (1.7 GB, made on first use)
	ci/verl_cpu.sh $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pytest --import-mode=prepend tests/hooks/verl_live

test-verl-whole:  ## verl's own main_ppo as a whole on CPU (3.3 GB, made on first use)
	ci/verl_whole_cpu.sh "$(VERL_WHOLE_VENV)"
	$(VERL_WHOLE_VENV)/bin/python -m pytest --import-mode=prepend tests/trainers/verl $(TRAINER_ARGS)

# $(call whole,FOLDER,SOURCES,SCRIPT,DIRECTORY): the tests of a trainer in the environment that ci/SCRIPT makes, if all
# sources are named.
UNSET = $(strip $(foreach source,$(1),$(if $($(source)),,$(source))))
ABSENT = $(strip $(foreach source,$(1),$(if $($(source)),$(if $(wildcard $($(source))),,$(source)))))
READY = $(if $(call UNSET,$(1))$(call ABSENT,$(1)),,$(VENV)/.test)
define whole
	@$(if $(call ABSENT,$(2)),echo "$@: $(foreach source,$(call ABSENT,$(2)),$(source)=$($(source))) is not there" >&2; exit 2,\
		$(if $(call UNSET,$(2)),echo "not run: $(1) as a whole trainer; make $@ $(foreach source,$(2),$(source)=CHECKOUT) (docs/trainers.md)",\
		PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" ci/$(3) "$(4)" && \
		$(foreach source,$(2),$(source)="$(abspath $($(source)))") MISMATCH_HOST_PYTHON="$(abspath $(4))/bin/python" \
		$(BIN)/python -m pytest --capture=no tests/trainers/$(1) $(TRAINER_ARGS)))
endef

test-slime: $(call READY,SLIME_SRC MEGATRON_SRC)  ## slime's train.py as a whole on CPU; needs SLIME_SRC= MEGATRON_SRC= (docs/trainers.md)
	$(call whole,slime,SLIME_SRC MEGATRON_SRC,slime_cpu.sh,$(SLIME_VENV))

test-miles: $(call READY,MILES_SRC MEGATRON_SRC)  ## miles's train.py; needs MILES_SRC= MEGATRON_SRC=
	$(call whole,miles,MILES_SRC MEGATRON_SRC,slime_cpu.sh,$(SLIME_VENV))

test-megatron-rl: $(call READY,MEGATRON_SRC)  ## Megatron-LM's train_rl.py; needs MEGATRON_SRC=
	$(call whole,megatron_rl,MEGATRON_SRC,slime_cpu.sh,$(SLIME_VENV))

test-nemo-rl: $(call READY,NEMO_RL_SRC)  ## NeMo-RL's run_grpo.py; needs NEMO_RL_SRC=
	$(call whole,nemo_rl,NEMO_RL_SRC,nemo_rl_cpu.sh,$(NEMO_RL_VENV))

$(DOORS_VENV)/.made: ci/trainers_cpu.txt ci/constraints-cpu.txt
	@echo "making $(DOORS_VENV) for TRL, prime-rl and SkyRL on CPU"
	$(PYTHON) -m venv $(DOORS_VENV)
	$(DOORS_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint ci/constraints-cpu.txt --requirement ci/trainers_cpu.txt
	@touch $@

test-trl: $(DOORS_VENV)/.made  ## TRL's GRPOTrainer as a whole on CPU (TRL from PyPI; 2 GB, made on first use)
	$(DOORS_VENV)/bin/python -m pytest tests/hooks/trl $(TRAINER_ARGS)

test-prime-rl: $(if $(PRIME_RL_SRC),$(DOORS_VENV)/.made)  ## prime-rl's train() as a whole on CPU; needs PRIME_RL_SRC=
	@$(if $(PRIME_RL_SRC),PRIME_RL_SRC="$(abspath $(PRIME_RL_SRC))" $(DOORS_VENV)/bin/python -m pytest tests/hooks/prime_rl \
		$(TRAINER_ARGS),echo "not run: prime-rl; make $@ PRIME_RL_SRC=CHECKOUT (docs/prime_rl.md)")

test-skyrl: $(if $(SKYRL_SRC),$(DOORS_VENV)/.made)  ## SkyRL's worker steps on CPU; needs SKYRL_SRC=
	@$(if $(SKYRL_SRC),SKYRL_SRC="$(abspath $(SKYRL_SRC))" $(DOORS_VENV)/bin/python -m pytest tests/hooks/skyrl \
		$(TRAINER_ARGS),echo "not run: SkyRL; make $@ SKYRL_SRC=CHECKOUT (docs/skyrl.md)")

lint: $(VENV)/.lint  ## ruff check, ruff format --check, pyright
	@failed=0; for command in "ruff check" "ruff format --check" "pyright --pythonpath $(BIN)/python"; do \
		echo "$$command"; $(BIN)/$$command || failed=1; \
	done; exit $$failed

format: $(VENV)/.lint  ## let ruff reformat and fix what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.test  ## write the generated tables of docs/ again
	$(BIN)/python -m ci.docs

clean:  ## remove environments, builds and caches
	rm -rf $(VENV) $(BENCH_PACKAGES) $(SGLANG_VENV) $(VERL_VENV) $(VERL_WHOLE_VENV) $(SLIME_VENV) $(NEMO_RL_VENV) $(DOORS_VENV) build dist .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@echo "making $(VENV) with $(PYTHON)"
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)

$(VENV)/.test: pyproject.toml $(wildcard ci/constraints*.txt) | $(VENV)/bin/python
	@echo "installing mismatch_plugin with megatron-core and all that its tests use into $(VENV)" \
		"($(if $(CONSTRAINTS),no GPU: torch of $(CONSTRAINTS),with GPU: torch as pip chooses it))"
	$(PIP_INSTALL) --editable '.[io,lab,test]'
	@touch $@

# Other libraries' Triton kernels, which the tests run in Triton's interpreter. They are read from a folder, not installed.
$(VENV)/.peers: Makefile | $(VENV)/.test
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/peers transformer-engine==2.20.2
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	@echo "installing ruff and pyright into $(VENV)"
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

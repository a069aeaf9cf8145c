# Every target makes .venv when it is missing and installs against constraints.txt once: `make run`
# what a run needs, all others the tools of tests and checks too.
#   make run           train the population of population.yaml, and for comparison as many agents
#                      without evolution; more with ARGS="--set seed=1". It ends with the commands
#                      that show the run and export its winner
#   make test          the fast tests
#   make test-slow     the long tests
#   make test-device   on a GPU, or on a device made of the CPU that refuses and counts as one
#   make test-distributed  runs in several processes, killed and resumed
#   make test-postgres  trials on a PostgreSQL server of its own, stopped and started; needs Debian's
#                      package postgresql, or another one with initdb and pg_ctl
#   make test-deepspeed  training with DeepSpeed, which it installs
#   make test-browser  the report in headless Chromium, Debian's package; installs playwright
#   make torture       kill runs at every touch of the disk, damage every file, fuzz; within an hour
#   make torture-io    refuse every call of the disk, cut the power after every call; within an hour
#   make test-trackers  the trackers with packages of their own, each following a run
#   make test-outside  the adapters of GEM, OpenEnv and verifiers, and rewards in TRL's style, against the packages
#   make fuzz          look for inputs that break a property of tests/fuzz, ten minutes for each of
#                      them; EVO_GRPO_FUZZ_SECONDS=60 for a minute, ARGS="-k cli" for some of them

#   make test-kernels  the kernels of generation, in Triton's interpreter and compiled for cards
#                      that are not here; installs Triton
#   make test-vllm     vLLM as the engine that generates, on this machine's CPU
#   make test-minimum  the fast tests on the oldest versions that pyproject.toml allows
#   make check         lint, types, import directions, docs
#   make docs          the documentation in a browser, at http://127.0.0.1:8000 (PORT=8001 for another)
#   make site          the documentation as files, into site/; its search needs a server, as make docs
#   make sbom          sbom.cdx.json anew from constraints.txt, after a change of it
#   make install       the environment alone
#   make clean-venv    throw the environments away

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
PIP_ARGS ?=
ARGS ?=

BIN := .venv/bin
# -qq: errors alone. A mirror or a local folder of wheels can make pip warn once for every package.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
# A stamp carries a checksum of what was installed: other contents install again, same contents never.
# What a run needs has a stamp of its own, for the tools of `make check` are most of the packages.
SUM := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
RUN_STAMP := .venv/.run-$(SUM)
STAMP := .venv/.installed-$(SUM)
BROWSER_STAMP := .venv/.browser-$(SUM)
DEEPSPEED_STAMP := .venv/.deepspeed-$(SUM)
# Two workers with one thread each: more threads than cores spin and make the tests several times slower.
# Each of the others has a target of its own.
FAST := not slow and not torture and not device and not distributed and not deepspeed and not postgres and not vllm and not kernels and not browser and not trackers
# Tests start many interpreters, which share compiled files, and write many run folders, which a run syncs
# to the disk file by file: they go to memory where it has room. pytest removes those of tests that passed.
ROOM := $(shell df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)
IN_MEMORY := $(shell test -z "$(TMPDIR)" && test "$(ROOM)" -gt 6000000 2>/dev/null && echo TMPDIR=/dev/shm)
TESTS := PYTHONDONTWRITEBYTECODE= $(IN_MEMORY) OMP_NUM_THREADS=1
# Each worker gets neighbouring tests, and so most fixtures of a module are made in one of them alone.
IN_TWO := -rs -n 2 --dist worksteal
# Slow tests wait for other processes: a third worker computes meanwhile.
IN_THREE := -rs -n 3 --dist worksteal
PYTEST := $(TESTS) $(BIN)/python -m pytest $(IN_TWO)
# Packages that do not install beside constraints.txt, in a folder of their own.
OUTSIDE := .outside
OUTSIDE_PINS := tests/envs/adapters/requirements-outside.txt
OUTSIDE_STAMP := $(OUTSIDE)/.installed-$(shell cksum < $(OUTSIDE_PINS) | cut -d' ' -f1)
TRACKERS := .trackers
TRACKERS_PINS := tests/readers/trackers/requirements-trackers.txt
TRACKERS_STAMP := $(TRACKERS)/.installed-$(shell cksum < $(TRACKERS_PINS) | cut -d' ' -f1)
# vLLM, in an environment of its own over the packages of .venv, which evo-grpo is not in.
VLLM := .vllm
VLLM_PINS := tests/rollout/vllm/requirements-vllm.txt
VLLM_STAMP := $(VLLM)/.installed-$(shell cksum < $(VLLM_PINS) | cut -d' ' -f1)
# Triton, in an environment of its own over the packages of .venv.
KERNELS := .kernels
KERNELS_PINS := tests/model/llama/cuda/requirements-kernels.txt
KERNELS_STAMP := $(KERNELS)/.installed-$(shell cksum < $(KERNELS_PINS) | cut -d' ' -f1)
# The lower bounds of pyproject.toml, in an environment of their own.
MINIMUM := .venv-minimum
MINIMUM_STAMP := $(MINIMUM)/.installed-$(shell cat pyproject.toml constraints-minimum.txt | cksum | cut -d' ' -f1)
# The writer of sbom.cdx.json.
SBOM := .venv-sbom
SBOM_PINS := docs/generate/requirements-sbom.txt
SBOM_STAMP := $(SBOM)/.installed-$(shell cksum < $(SBOM_PINS) | cut -d' ' -f1)
# The theme prints a notice about its successor on every build without it.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
BUILD_DOCS := $(MKDOCS) build -q --strict
PORT ?= 8000

.PHONY: help install environments run test test-slow torture torture-io test-device test-distributed test-deepspeed test-browser test-postgres test-trackers test-outside test-vllm test-kernels test-minimum fuzz check docs site sbom clean-venv
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

install: $(STAMP)

# All of them, for .ci/run; `make -j2 environments` makes two at a time.
environments: $(STAMP) $(MINIMUM_STAMP) $(OUTSIDE_STAMP) $(TRACKERS_STAMP) $(VLLM_STAMP) $(KERNELS_STAMP)

$(RUN_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'evo-grpo needs Python 3.11 or newer, and "$(PYTHON)" is not one.'; \
	  echo 'Install one and name it: make PYTHON=/path/to/python3.11 ...'; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@rm -f .venv/.run-* .venv/.installed-*
	@echo 'Installing what a run needs into .venv: a minute or two the first time.'
	@# torch first and alone: resolved with the rest, another and much larger build may be taken.
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@# With plotly: a run ends with commands to look at it, and one of them writes the report.
	@$(PIP) -e '.[report]'
	@touch $@

# After the other one, whose time does not matter: both names carry the same checksum.
$(STAMP): | $(RUN_STAMP)
	@rm -f .venv/.installed-*
	@echo 'Installing what tests and checks need into .venv: a minute or two the first time.'
	@$(PIP) -e '.[dev]'
	@touch $@

run: $(RUN_STAMP)
	$(BIN)/evo-grpo run population.yaml --compare $(ARGS)

test: $(STAMP)
	$(PYTEST) -m '$(FAST)' $(ARGS)

# A per-test limit of 15 minutes; pytest's code 5, no such test, is no failure. The wheel is for the
# commands of the README, which run from it and from the clone.
test-slow: $(STAMP)
	@wheels=$$(mktemp -d) && trap 'rm -rf "$$wheels"' EXIT && \
	  $(BIN)/python -m pip wheel -qq --disable-pip-version-check $(PIP_ARGS) --no-deps \
	    --wheel-dir "$$wheels" . && \
	  export EVO_GRPO_WHEEL=$$(echo "$$wheels"/*.whl) && \
	  { $(TESTS) $(BIN)/python -m pytest $(IN_THREE) -m 'slow and not torture' --timeout 900 $(ARGS) || test $$? -eq 5; }

# EVO_GRPO_TEST_DEVICE=rehearsal for the device made of the CPU where torch finds a GPU.
test-device: $(STAMP)
	$(PYTEST) -m device tests/device $(ARGS)

# Runs in several processes on this machine, each with one thread; they wait for each other.
test-distributed: $(STAMP)
	$(TESTS) $(BIN)/python -m pytest $(IN_THREE) -m distributed tests/distributed $(ARGS)

# Each worker has a server of its own; fails where none is installed.
test-postgres: $(STAMP)
	$(PYTEST) -m postgres tests/postgres $(ARGS)

$(DEEPSPEED_STAMP): $(STAMP)
	@rm -f .venv/.deepspeed-*
	@# Without a compiler: what it would compile, nothing here uses.
	@DS_BUILD_OPS=0 $(PIP) -e '.[deepspeed]'
	@touch $@

# The variable turns the skip for a missing package into a failure.
test-deepspeed: $(DEEPSPEED_STAMP)
	EVO_GRPO_DEEPSPEED=1 $(PYTEST) -m deepspeed tests/deepspeed $(ARGS)

$(BROWSER_STAMP): $(STAMP)
	@rm -f .venv/.browser-*
	@$(PIP) -e '.[browser]'
	@touch $@

# The variable turns the skip for a missing package or browser into a failure.
test-browser: $(BROWSER_STAMP)
	EVO_GRPO_BROWSER=1 $(TESTS) $(BIN)/python -m pytest -rs -m browser tests/browser $(ARGS)

# Prints a table of what was tried, for docs/reliability.md; a failure stops it before.
torture: $(STAMP) $(TRACKERS_STAMP)
	@table=$$(mktemp) && trap 'rm -f "$$table"' EXIT && export EVO_GRPO_TORTURE_TABLE=$$table && \
	  PYTHONPATH=$(TRACKERS) $(PYTEST) -m 'torture or slow' tests/torture \
	  tests/test_corruption.py $(ARGS) && \
	  EVO_GRPO_FUZZ_SECONDS=60 $(PYTEST) --timeout 360 tests/fuzz $(ARGS) && \
	  $(BIN)/python tests/helpers/torture_table.py

# The same for the disk that refuses calls, and the one that forgets what was not synced.
torture-io: $(STAMP)
	@table=$$(mktemp) && trap 'rm -f "$$table"' EXIT && export EVO_GRPO_TORTURE_TABLE=$$table && \
	  $(PYTEST) -m torture tests/torture_io $(ARGS) && \
	  $(BIN)/python tests/helpers/torture_table.py

# After .venv, whose Python and packages it is installed for and leans on.
$(OUTSIDE_STAMP): $(STAMP)
	@echo 'Installing into $(OUTSIDE): less than a minute.'
	@rm -rf $(OUTSIDE)
	@# Without constraints.txt, which they do not fit, and without dependencies: all are listed.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	  --no-deps --target $(OUTSIDE) -r $(OUTSIDE_PINS)
	@touch $@

# The variable turns the skip for a missing package into a failure.
test-outside: $(OUTSIDE_STAMP)
	PYTHONPATH=$(OUTSIDE) EVO_GRPO_OUTSIDE=$(OUTSIDE) $(TESTS) $(BIN)/python -m pytest -rs \
	  tests/envs/adapters/test_gem.py tests/envs/adapters/test_openenv.py tests/envs/adapters/test_verifiers.py \
	  tests/envs/rewards/test_trl_outside.py tests/envs/test_templates_outside.py \
	  -n 2 $(ARGS)

$(TRACKERS_STAMP): $(STAMP)
	@echo 'Installing into $(TRACKERS): less than a minute.'
	@rm -rf $(TRACKERS)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	  --no-deps --target $(TRACKERS) -r $(TRACKERS_PINS)
	@touch $@

# The variable turns the skip for a missing package into a failure.
test-trackers: $(TRACKERS_STAMP)
	PYTHONPATH=$(TRACKERS) EVO_GRPO_TRACKERS=1 $(PYTEST) -m trackers tests/readers/trackers $(ARGS)

# The file lets its Python find the packages of .venv, but not what is installed there in place.
$(VLLM_STAMP): $(STAMP)
	@echo 'Installing into $(VLLM): less than a minute.'
	@rm -rf $(VLLM)
	@$(BIN)/python -m venv --without-pip $(VLLM)
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))' && \
	  inside=$$($(VLLM)/bin/python -c "$$packages") && \
	  $(BIN)/python -c "$$packages" > "$$inside/beside.pth" && \
	  $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	    --no-deps --target "$$inside" -r $(VLLM_PINS)
	@touch $@

# The variable turns the skip for a missing vLLM into a failure.
test-vllm: $(VLLM_STAMP)
	EVO_GRPO_VLLM=$(CURDIR)/$(VLLM)/bin/python $(PYTEST) -m vllm \
	  --timeout 300 tests/rollout/vllm $(ARGS)

$(KERNELS_STAMP): $(STAMP)
	@echo 'Installing into $(KERNELS): less than a minute.'
	@rm -rf $(KERNELS)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	  --no-deps --target $(KERNELS) -r $(KERNELS_PINS)
	@touch $@

# The interpreter is chosen when Triton is imported, and compiles nothing.
test-kernels: $(KERNELS_STAMP)
	PYTHONPATH=$(KERNELS) $(PYTEST) -m kernels --timeout 300 tests/model/llama/cuda/test_cubins.py $(ARGS)
	PYTHONPATH=$(KERNELS) TRITON_INTERPRET=1 $(PYTEST) -m kernels --timeout 300 \
	  --ignore tests/model/llama/cuda/test_cubins.py tests/model/llama/cuda $(ARGS)

# At the end it says of each property how many inputs were tried and whether one failed. `make test`
# and `make test-slow` try up to fifty inputs of each, the same ones every time. One that hangs is
# given five minutes.
FUZZ_SECONDS = $(or $(EVO_GRPO_FUZZ_SECONDS),600)
fuzz: $(STAMP)
	EVO_GRPO_FUZZ_SECONDS=$(FUZZ_SECONDS) $(PYTEST) tests/fuzz \
	  --timeout $$(expr $(FUZZ_SECONDS) + 300) $(ARGS)

$(MINIMUM_STAMP):
	@test -x $(MINIMUM)/bin/python || $(PYTHON) -m venv $(MINIMUM)
	@rm -f $(MINIMUM)/.installed-*
	@echo 'Installing into $(MINIMUM): a few minutes the first time.'
	@# torch first, as for .venv.
	@$(MINIMUM)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	  -c constraints-minimum.txt "$$(grep '^torch==' constraints-minimum.txt)"
	@$(MINIMUM)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	  -c constraints-minimum.txt -e '.[test]'
	@touch $@

# tests/fuzz: its properties fail on older releases of numpy and pydantic, with messages of their own.
NOT_ON_MINIMUM := tests/fuzz tests/docs tests/experiments tests/test_architecture.py tests/test_makefile.py \
  tests/test_readme.py tests/test_repository.py
# What these test imports no package that is older there, but for numpy and pydantic, which nearly all
# that is tested needs: tests/test_dependencies.py holds them to it. They are more than half of the time.
OWN_CODE := tests/analysis/test_verify.py tests/analysis/test_arms_compare.py tests/analysis/test_arms_replay.py \
  tests/api/test_unapplied.py tests/api/test_resume.py \
  tests/cli/plan/test_gpu.py tests/cli/plan/test_runs_no_code.py \
  tests/cli/test_foreign_text.py tests/cli/test_host_memory.py \
  tests/cli/test_steer.py tests/cli/test_stopping.py tests/envs/rewards tests/evolve tests/learn \
  tests/population/ranks tests/population/test_evaluate.py tests/population/test_plan.py \
  tests/population/test_rollouts.py tests/population/test_round.py \
  tests/population/test_stats.py tests/population/test_steps.py tests/readers/test_dashboard.py \
  tests/readers/test_database.py tests/readers/test_follow.py tests/readers/test_reader.py tests/readers/trackers \
  tests/record/test_choice.py tests/record/test_log.py tests/record/test_study.py tests/rollout/vllm \
  tests/schema/test_patterns.py tests/settings/test_limits.py tests/settings/test_without_effect.py \
  tests/test_corruption.py tests/test_stop_rules.py tests/training/test_resume_check.py tests/training/test_resuming.py \
  tests/training/test_steering.py tests/training/test_strategies.py
test-minimum: $(MINIMUM_STAMP)
	@echo 'Left out, since they test messages, pages, scripts and files of the repository, which are the'
	@echo 'same with all versions of a package: $(NOT_ON_MINIMUM)'
	@echo 'Left out too, since the code that they test imports none of the packages that are older here,'
	@echo 'but for numpy and pydantic, which all others need as well: $(OWN_CODE)'
	$(TESTS) $(MINIMUM)/bin/python -m pytest $(IN_TWO) \
	  -m '$(FAST)' $(addprefix --ignore ,$(NOT_ON_MINIMUM) $(OWN_CODE)) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/test_architecture.py
	@site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && $(BUILD_DOCS) --site-dir "$$site" && echo 'docs: ok'

# On the loopback alone: nobody else can reach it.
docs: $(STAMP)
	@echo 'The documentation, with its search: http://127.0.0.1:$(PORT)  (Ctrl-C ends it)'
	@$(MKDOCS) serve -q --dev-addr 127.0.0.1:$(PORT)

site: $(STAMP)
	$(BUILD_DOCS)
	@echo 'Open site/index.html. A browser lets no file search: for that, make docs'

$(SBOM_STAMP):
	@test -x $(SBOM)/bin/python || $(PYTHON) -m venv $(SBOM)
	@rm -f $(SBOM)/.installed-*
	@$(SBOM)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	  --no-deps -r $(SBOM_PINS)
	@touch $@

# Reproducible: without time and serial number, the same pins give the same file. The tool warns that a
# list of pins does not say which package needs which.
sbom: $(SBOM_STAMP)
	PYTHONWARNINGS=ignore $(SBOM)/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library \
	  --spec-version 1.6 --output-reproducible --output-file sbom.cdx.json constraints.txt

clean-venv:
	rm -rf .venv $(OUTSIDE) $(TRACKERS) $(VLLM) $(KERNELS) $(MINIMUM) $(SBOM)

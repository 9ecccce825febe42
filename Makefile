# Everything a fresh machine needs is Python 3.10 or newer and make. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := -e '.[cli,eval,tune]' -e integrations/langchain-adafuse -e integrations/llama-index-llms-adafuse
SETUP := $(VENV)/.set-up
QUESTION ?= What does a visit to the Silesse Mill cost?

export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format docs cookbooks bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(SETUP) ## set up, then answer a question over the shipped handbook with three small models
	@$(BIN)/adafuse ask "$(QUESTION)" --max-words 1

test: $(SETUP) ## set up, then run all tests
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

test-slow: $(SETUP) ## the longer sweeps
	$(BIN)/python -m pytest -m slow

lint: $(SETUP) ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(SETUP) ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(SETUP) ## the documentation site, in site/; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q docs site

cookbooks: $(SETUP) ## run the cookbooks again and store their outputs
	$(BIN)/python -m tests.support.notebooks

bench: $(SETUP) ## the figures the README quotes
	$(BIN)/python benchmarks/embedded_skills.py
	$(BIN)/python benchmarks/embedded_agents.py
	$(BIN)/python -m benchmarks.speed --output speed.json --markdown speed.md

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache site docs/cookbooks jupyter_execute

$(SETUP): pyproject.toml constraints.txt integrations/langchain-adafuse/pyproject.toml integrations/llama-index-llms-adafuse/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "adafuse-llm needs Python 3.10 or newer; set PYTHON=/path/to/it")'
	@echo "setting up $(VENV) (once; this installs torch and transformers)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --group dev --group docs --group cookbooks
	@touch $@

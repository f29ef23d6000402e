# `make demo` and `make test` work from a fresh checkout: Python 3.11+ and make are enough.
#
#   PYTHON=python3.12 make demo      another interpreter
#   UV_TORCH_BACKEND=cpu make demo   torch without CUDA, if the default build has CUDA
#   make test ARGS='-k lion -x'      arguments for pytest

PYTHON ?= python3
# Each worker has one torch thread, because with more the workers wait for each other. Bytecode is
# kept, because some tests start many processes.
JOBS ?= 2
ARGS ?=
# `make check` runs these without the tests marked slow. The rest of tests/lab starts processes.
CHECKED := $(wildcard tests/test_*.py) \
  $(addprefix tests/,core zoo geometry wrappers anchors layers backends theory parallel/test_layout.py) \
  $(addprefix tests/lab/,test_model.py test_loader.py test_stats.py test_report.py)

PY := .venv/bin/python
STAMP := .venv/ok

.PHONY: help setup demo check test portable lint format types parity layers bases results docs clean

help:
	@echo 'make demo     AdamW with three weight decays, and SODA(AdamW) without one'
	@echo 'make check    a subset of the tests for the daily loop, in under a minute'
	@echo 'make test     run all tests'
	@echo 'make portable the tests that compare numbers, as on other CPUs'
	@echo 'make lint     check format and style'
	@echo 'make format   repair format and style'
	@echo 'make types    check types'
	@echo 'make parity   compare with other implementations (writes docs/parity.md)'
	@echo 'make layers   plan known architectures (writes docs/layers.md)'
	@echo 'make bases    probe every installed optimizer (writes docs/bases.md)'
	@echo 'make results  write docs/results.md, and the claims in other pages, from results/'
	@echo 'make docs     build the site into site/, with all links checked'
	@echo 'make setup    only create .venv (the other commands do this when needed)'
	@echo 'make clean    remove .venv, caches and build output'

setup: $(STAMP)
	@:

# The stamp is the last thing written, so an interrupted set-up is not taken for a finished one.
# .venv/partial marks an environment that was not finished. It is removed and made again. Any other
# .venv, also one made by hand, is kept and updated.
# uv does not read pip's settings, so the two settings that name the source of packages are passed on.
$(STAMP): pyproject.toml constraints.txt
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo '$(PYTHON) not found: install Python 3.11 or newer, or name one: make PYTHON=...' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	  "sodaopt needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name a newer one: make PYTHON=python3.11" \
	  % sys.version_info[:2])'
	@if [ -e .venv/partial ]; then rm -rf .venv; fi
	@if ! [ -x $(PY) ]; then \
	  echo 'Setting up .venv (once; torch is a large download)' && \
	  mkdir -p .venv && touch .venv/partial && '$(PYTHON)' -m venv .venv; fi
	@$(PY) -m pip install -q --disable-pip-version-check uv
	@if [ -t 2 ]; then quiet=; else quiet=-q; fi; \
	  UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}" \
	  UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-}}" \
	  $(PY) -m uv pip install $$quiet --python $(PY) -c constraints.txt -e '.[lab,test]'
	@rm -f .venv/partial
	@touch $@

demo: $(STAMP)
	@$(PY) -m sodaopt.cli sweep adamw 'soda(adamw)' --over wd=0,1,4 --seeds 0-4 --device cpu --out runs/demo

test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) $(ARGS)

check: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) -m 'not slow and not gpu' $(CHECKED) $(ARGS)

# Other CPUs round differently. These tests compare numbers, so they must pass with other kernels and
# other numbers of threads too.
PORTABLE := tests/zoo/test_zoo.py tests/test_parity.py tests/geometry/test_polar.py \
  tests/test_fixtures.py tests/theory/test_identities.py tests/theory/test_problems.py
portable: $(STAMP)
	MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) $(PORTABLE) $(ARGS)
	OMP_NUM_THREADS=2 $(PY) -m pytest -q $(PORTABLE) -m 'not slow' $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	.venv/bin/lint-imports --no-logo

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

types: $(STAMP)
	$(PY) -m mypy

parity: $(STAMP)
	@UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}" \
	  UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-}}" \
	  $(PY) -m uv pip install -q --python $(PY) -c constraints.txt -e '.[lab,test,parity]'
	$(PY) -m tools.parity

layers: $(STAMP)
	@UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}" \
	  UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-}}" \
	  $(PY) -m uv pip install -q --python $(PY) -c constraints.txt -e '.[lab,test,layers]'
	$(PY) -m tools.layers_doc

bases: $(STAMP)
	$(PY) -m tools.known_bases

results: $(STAMP)
	$(PY) -m tools.results_doc

# mkdocs reads the source without importing it. --strict fails on a link or an anchor without target.
docs: $(STAMP)
	@UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}" \
	  UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-}}" \
	  $(PY) -m uv pip install -q --python $(PY) -c constraints.txt -e '.[lab,test,docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	$(PY) -m tools.site_names site

# Results under runs/ stay.
clean:
	rm -rf .venv dist build site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

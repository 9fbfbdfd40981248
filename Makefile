# One verb each. Every target sets up what it needs; a second call skips what is done.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 3

.PHONY: help setup setup-torch demo test test-quick test-others test-wheel test-wheel-oldest test-slow test-deployment check docs package bench tables clean
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

# The stamp makes a second call free; a changed pyproject.toml installs again.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"fedpick needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. Call make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[all,dev,docs]'
	@touch $@

setup: $(VENV)/.installed ## create .venv and install everything

setup-torch: setup ## add PyTorch for its tests, where pip finds a build for CPUs (others take gigabytes)
	@$(BIN)/pip install --quiet 'torch==2.13.0+cpu' || echo 'pip finds no build of PyTorch for CPUs; its tests are skipped.'

demo: setup ## compare policies on an embedded data set; ends with a table and a report
	$(BIN)/fedpick demo

# The other checks mostly use one core each and wait for files: beside the tests they fill the gaps.
test: setup ## lint, types, all quick tests, the wheel and the documentation
	$(MAKE) --jobs 2 test-quick test-others

test-quick: setup
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not slow"

test-others: setup # prints when all have ended, so that the lines of the tests stay together
	@mkdir -p build
	@$(MAKE) check test-wheel docs > build/others.log 2>&1; code=$$?; cat build/others.log; exit $$code

test-wheel: setup ## install the wheel with every extra alone, in fresh environments, and use it
	$(BIN)/python scripts/try_wheel.py

test-wheel-oldest: setup ## the same with the oldest dependencies that pyproject.toml allows
	$(BIN)/python scripts/try_wheel.py --oldest

check: setup ## lint and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/fedpick benchmarks

test-slow: setup ## the tests that take minutes (estimated: fuzzers 40, kills 35, federations 20 minutes, others)
	$(BIN)/pytest -m slow

test-deployment: setup ## real federations (Flower, both APIs; NVFlare) that lose clients and servers; old Flower (20 minutes)
	$(BIN)/pytest -m slow tests/flower/test_deployment.py tests/flower/test_versions.py tests/test_nvflare.py

docs: setup ## build the documentation in build/site; tutorials run; a broken link or an undocumented name fails
	$(BIN)/sphinx-build --quiet --jobs $(WORKERS) --fail-on-warning --keep-going -d build/doctrees docs build/site
	$(BIN)/python scripts/check_site.py build/site

package: setup ## build the source distribution and the wheel in dist/, and check their metadata
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*

bench: setup ## the simulator beside sequential loops, and the cost of decisions (minutes)
	$(BIN)/python -m benchmarks.speed sim --against sequential,torch --jobs j1,j2
	$(BIN)/python -m benchmarks.speed select --largest 100000

tables: setup ## make the published tables and figures again (half a day of processor time; ONLY=ca-fed.md for a page)
	$(BIN)/python -m benchmarks.reproduce $(if $(ONLY),--only '$(ONLY)')

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

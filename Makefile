# Two commands from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test test-avx2 test-slow lint types docs package clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/hush demo

# Two workers of one thread each: small tensors gain nothing from more, and workers would fight. Compiled
# modules are kept, whatever the environment says: tests start many processes that import them.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal

test: lint types
	$(PYTEST) -m "not slow"

# Kernels, and so rounding, differ between instruction sets: what is numerical, as an older machine does it.
test-avx2: $(READY)
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -m "not slow" \
		tests/gradients tests/recipes/models tests/clipping tests/noise

test-slow: $(READY)
	$(PYTEST)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# The site of docs/ and of the docstrings, in site/; it opens from the disk, and nothing is fetched for it.
docs: .venv/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel, installed and run in an environment of its own, outside of the clone.
package:
	PYTHON=$(PYTHON) .ci/package

clean:
	rm -rf .venv runs site

# torch goes first and alone: anything else would let its own idea of torch in.
$(READY): pyproject.toml recipes/pyproject.toml constraints.txt
	@echo 'setting up .venv: some minutes, most of them for the download of torch'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --constraint constraints.txt torch
	$(BIN)/pip install --constraint constraints.txt --editable '.[dev]' --editable ./recipes
	touch $@

.venv/ready-docs: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

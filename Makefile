# Every target creates and reuses its own .venv, with the pinned versions of constraints.txt; test-families has
# an environment of its own, with open_clip, timm and the torchvision that they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

FAMILIES := .venv-families
FAMILIES_STAMP := $(FAMILIES)/.installed

.PHONY: setup setup-families demo test test-families lint docs bench clean

# Libraries are compiled when they are first imported, most of their modules never: the compiled ones must be kept.
unexport PYTHONDONTWRITEBYTECODE

# create FOLDER,CONSTRAINTS,EXTRA: the pip of older Pythons takes twice as long as the pinned one.
define create
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --no-compile -c $(2) --upgrade pip
	$(1)/bin/python -m pip install --quiet --no-compile -c $(2) -e ".[$(3)]"
	touch $(1)/.installed
endef

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(call create,$(VENV),constraints.txt,dev)

setup-families: $(FAMILIES_STAMP)

$(FAMILIES_STAMP): pyproject.toml constraints-families.txt
	$(call create,$(FAMILIES),constraints-families.txt,test-families)

demo: setup
	$(BIN)/tuneport demo --overwrite

# Two workers share the cores, also with the programs that they start.
test test-families: export OMP_NUM_THREADS := 1

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-families: setup-families
	$(FAMILIES)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" tests/models/families

lint: setup
	$(BIN)/ruff format --check src tests paper benchmarks tools examples
	$(BIN)/ruff check src tests paper benchmarks tools examples
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

docs: setup
	$(BIN)/mkdocs build --strict

BENCH ?= bench-results

bench: setup
	$(BIN)/python benchmarks/speed/solvers.py --out $(BENCH)
	$(BIN)/python benchmarks/speed/accumulation.py --out $(BENCH)
	$(BIN)/python benchmarks/speed/vit.py --out $(BENCH)
	$(BIN)/python benchmarks/speed/llama.py --samples 8 --length 64 --max-tokens 64 --out $(BENCH)
	$(BIN)/python benchmarks/speed/scaling.py --out $(BENCH)
	$(BIN)/python benchmarks/speed/budget.py --out $(BENCH)
	$(BIN)/python benchmarks/speed/processes.py --out $(BENCH)

clean:
	rm -rf $(VENV) $(FAMILIES) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis tuneport-demo

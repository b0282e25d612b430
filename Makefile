# `make labs` and `make test` do everything on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: labs test notebooks figures clean

labs: .venv/installed
	$(BIN)/labkit run --out build

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check labkit tests
	$(BIN)/python -m pytest -q

# After editing a notebook's source.
notebooks: .venv/installed
	$(BIN)/python -m labkit.notebooks

# After editing a record, a trace, or the code that draws them.
figures: .venv/installed
	$(BIN)/python -m labkit.figures

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

clean:
	rm -rf .venv build

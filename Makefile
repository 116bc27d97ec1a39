# make baseline   install, then run the whole chain on the embedded dataset
# make test       install, then lint and run the tests that take seconds each
# make test-slow  install, then run the others
# make test-all   install, then lint and run both
# make test-slurm the tests that start a Slurm of their own; as root, with slurm-wlm, munge and rsync installed
# make test-fresh the README's two commands and the unit tests on a fresh Debian; as root, with debootstrap installed
# make lint       install, then lint only
# make install    everything that pyproject.toml lists, into .venv; files are checked against requirements.lock
# make operators  list the operators of the installed Data-Juicer, for a review after an upgrade (docs/data_reference.md)
# make lmms_eval  lmms-eval into .lmms_eval, for `snakemake evaluate` without conda
# make lock       writes the *.lock files again after a change of versions in pyproject.toml or requirements-lmms_eval.txt
#
# PYTHON names another Python, as in `make install PYTHON=/opt/python/bin/python3.12`, and TEST_PROCESSES the number of
# processes that share the tests; each takes up to 3 GB. PYTEST_OPTIONS adds options, as in `make test-slow
# PYTEST_OPTIONS=--exitfirst`.

# the newest Python that has the venv module; without one, the newest, whose missing packages `make install` names
find_python = $(shell for name in python3.13 python3.12 python3.11 python3; do \
    "$$name" -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14)$(1)' 2> /dev/null && echo "$$name" && break; done)
PYTHON ?= $(or $(call find_python,; import ensurepip),$(call find_python),python3)
TEST_PROCESSES ?= 4
ACTIVATE = . .venv/bin/activate
TORCH = $(shell grep --only-matching 'torch==[0-9.]*' pyproject.toml)
PACKAGE_INDEX = $(or $(PIP_INDEX_URL),$(shell $(PYTHON) -m pip config get global.index-url 2> /dev/null),https://pypi.org/simple)
PIP_INSTALL = .venv/bin/python -m pip --disable-pip-version-check install --quiet --quiet
# tests/conftest.py forms groups and puts the longest first
PYTEST = $(ACTIVATE) && python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder $(PYTEST_OPTIONS)

.PHONY: install lmms_eval lock baseline configuration operators test test-slow test-all test-slurm test-fresh lint

ifneq "$(words $(CURDIR))" "1"
$(error The path of this folder has a space in it, with which PyTorch cannot compile DeepSpeed's optimizer: $(CURDIR). \
    Move the project to a path without spaces; folders of your data may have them)
endif

install: .venv/installed

lmms_eval: .lmms_eval/installed

# For Linux on every processor. requirements.lock has no hashes of torch, because its builds differ.
lock:
	@$(ACTIVATE) && uv lock --quiet --default-index https://pypi.org/simple \
	    && uv export --quiet --frozen --prune torch --no-annotate --output-file requirements.lock \
	    && uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-deps --no-annotate \
	        --default-index https://pypi.org/simple --custom-compile-command "make lock" \
	        --output-file requirements-lmms_eval.lock requirements-lmms_eval.txt

baseline: install
	$(ACTIVATE) && snakemake --cores 1 baseline

configuration: install
	$(ACTIVATE) && python workflow_scripts/tools/write_configuration.py

operators: install
	$(ACTIVATE) && python workflow_scripts/tools/list_operators.py

test: lint
	$(PYTEST)

test-slow: install
	$(PYTEST) -m slow

test-all: lint
	$(PYTEST) -m ""

test-slurm: install
	$(ACTIVATE) && python -m pytest tests/slurm -m "" $(PYTEST_OPTIONS)

test-fresh:
	bash tests/fresh_machine.sh

lint: install
	$(ACTIVATE) && ruff check --no-cache . && ruff format --no-cache --check . && snakefmt --check Snakefile rules \
	    && PYTHONPATH=workflow_scripts lint-imports --no-logo && vulture && codespell

# In a folder of its own, because its dependencies would replace the PyTorch in .venv.
.lmms_eval/installed: requirements-lmms_eval.lock .venv/installed
	@echo "Installing lmms-eval into .lmms_eval: once, some seconds"
	@rm -rf .lmms_eval
	@$(PIP_INSTALL) --require-hashes --no-deps --target .lmms_eval --requirement $<
	@touch $@

ifneq "$(shell readlink .venv)" ""
# a linked environment belongs to another checkout, whose `make install` keeps it up to date
.venv/installed:
else
# A virtual environment holds absolute paths: after the project was moved it is made again.
ifneq "$(file < .venv/installed)" "$(CURDIR)"
.PHONY: .venv/installed
endif

# --clear: what uv.lock no longer lists must not linger. DeepSpeed's CPU extensions are compiled here
# rather than at first use, in the middle of a training stage.
# uv installs in an eighth of pip's time; pip does it if uv cannot reach a package index that only pip's settings describe.
# Bytecode is compiled here, as pip does. Where PYTHONDONTWRITEBYTECODE is set, every process would compile it again, which
# doubles the time to import transformers (17 instead of 8 s).
# torch is installed last, by version only: its builds have different hashes, and a CUDA build requires more packages.
.venv/installed: uv.lock requirements.lock
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14)' 2> /dev/null \
	    || { echo "make: this needs Python 3.11, 3.12 or 3.13, but $(PYTHON) is not one of them." \
	        "Name one with PYTHON=<path>" >&2; exit 1; }
	@test -f "$$($(PYTHON) -c 'import ensurepip, sysconfig; print(sysconfig.get_path("include"))' 2> /dev/null)/Python.h" \
	    || { echo "make: $(PYTHON) has no venv module or no headers. On Debian and Ubuntu:" \
	        "apt-get install $(PYTHON)-venv $(PYTHON)-dev" >&2; exit 1; }
	@echo "Installing the packages of requirements.lock into .venv, for $$($(PYTHON) -V): once, about a minute"
	@$(PYTHON) -m venv --clear .venv
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.txt
	@$(PIP_INSTALL) --require-hashes --no-deps --requirement .venv/uv.txt
	@.venv/bin/uv pip install --quiet --python .venv/bin/python --default-index "$(PACKAGE_INDEX)" \
	    --compile-bytecode --require-hashes --no-deps --requirement requirements.lock 2> .venv/uv.log \
	    || $(PIP_INSTALL) --require-hashes --no-deps --requirement requirements.lock
	@echo "Installing $(TORCH): its CUDA build takes several GB, the CPU build (README) 200 MB"
	@if test -t 1; then .venv/bin/python -m pip --disable-pip-version-check install $(TORCH); \
	    else $(PIP_INSTALL) $(TORCH); fi
	@if command -v c++ > /dev/null; then \
	    echo "Compiling DeepSpeed's extensions for this processor: once, a minute or two"; \
	    $(ACTIVATE) && python workflow_scripts/compile_extensions.py > .venv/extensions.log 2>&1 \
	        || echo "They cannot be compiled (reason: .venv/extensions.log)." \
	            "PyTorch's optimizer on the CPU replaces DeepSpeed's, which would be faster"; \
	else \
	    echo "There is no C++ compiler: PyTorch's optimizer on the CPU replaces DeepSpeed's, which would be faster"; \
	fi
	@echo "$(CURDIR)" > $@
endif

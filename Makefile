# make baseline   install, then run the whole chain on the embedded dataset
# make test       install, then lint and run the test suite
# make test-slurm the tests that start a Slurm of their own; as root, with slurm-wlm, munge and rsync installed
# make lint       install, then lint only
# make install    everything from requirements.txt, into .venv
#
# PYTHON names another Python 3.11, as in `make install PYTHON=/opt/python/bin/python3.11`.

PYTHON ?= python3.11
ACTIVATE = . .venv/bin/activate

.PHONY: install baseline test test-slurm lint

ifneq "$(words $(CURDIR))" "1"
$(error The path of this folder has a space in it, with which PyTorch cannot compile DeepSpeed's optimizer: $(CURDIR). \
    Move the project to a path without spaces; folders of your data may have them)
endif

install: .venv/installed

baseline: install
	$(ACTIVATE) && snakemake --cores 1 baseline

test: lint
	$(ACTIVATE) && python -m pytest

test-slurm: install
	$(ACTIVATE) && python -m pytest tests/slurm

lint: install
	$(ACTIVATE) && ruff check . && ruff format --check . && snakefmt --check Snakefile rules && snakemake --lint

# A virtual environment holds absolute paths: after the project was moved it is made anew.
ifneq "$(file < .venv/installed)" "$(CURDIR)"
.PHONY: .venv/installed
endif

# --clear: what requirements.txt no longer lists must not linger. DeepSpeed's CPU extensions are compiled here
# rather than at first use, in the middle of a training stage.
.venv/installed: requirements.txt
	@test -f "$$($(PYTHON) -c 'import ensurepip, sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
	    && command -v g++ > /dev/null \
	    || { echo "make: this needs Python 3.11 with its venv module and headers, and g++." \
	        "On Debian: apt-get install python3.11-venv python3.11-dev g++" >&2; exit 1; }
	@echo "Installing requirements.txt into .venv: once, some minutes"
	@$(PYTHON) -m venv --clear .venv
	@.venv/bin/python -m pip --disable-pip-version-check install --quiet --quiet --requirement requirements.txt
	@echo "Compiling DeepSpeed's extensions for this processor: once, a minute or two"
	@$(ACTIVATE) && python workflow_scripts/compile_extensions.py
	@echo "$(CURDIR)" > $@

# Everything that `make install` installs, for clusters that run containers. The project itself stays on a volume.
#   docker build --tag registry.example.org/dj2mgm:latest .
# Without GPUs: --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# The digest is from https://github.com/docker-library/repo-info (repos/python/remote/3.11-slim-bookworm.md, August 2026).
FROM python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b

# g++ compiles DeepSpeed's optimizer; jobs without a volume clone the project (docs/cloud.md)
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm --recursive /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL
COPY pyproject.toml requirements.lock /opt/dj2mgm/
# torch by version only: its builds have different hashes, and a CUDA build requires more packages
RUN pip install --no-cache-dir --require-hashes --no-deps --requirement /opt/dj2mgm/requirements.lock \
    && pip install --no-cache-dir "$(grep --only-matching 'torch==[0-9.]*' /opt/dj2mgm/pyproject.toml)"

# Compiled once here, rather than in each job
ENV TORCH_EXTENSIONS_DIR=/opt/dj2mgm/torch_extensions
COPY workflow_scripts /opt/dj2mgm/workflow_scripts
RUN python /opt/dj2mgm/workflow_scripts/compile_extensions.py && chmod --recursive a+rwX "$TORCH_EXTENSIONS_DIR"

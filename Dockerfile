# Everything that `make install` installs, for clusters that run containers. The project itself stays on a volume.
#   docker build --tag registry.example.org/dj2mgm:latest .
# Without GPUs: --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
FROM python:3.11-slim-bookworm

# g++ compiles DeepSpeed's optimizer
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm --recursive /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL
COPY requirements.txt /opt/dj2mgm/
RUN pip install --no-cache-dir --requirement /opt/dj2mgm/requirements.txt

# Compiled once here, rather than in each job
ENV TORCH_EXTENSIONS_DIR=/opt/dj2mgm/torch_extensions
COPY workflow_scripts /opt/dj2mgm/workflow_scripts
RUN python /opt/dj2mgm/workflow_scripts/compile_extensions.py && chmod --recursive a+rwX "$TORCH_EXTENSIONS_DIR"

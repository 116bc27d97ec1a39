#!/usr/bin/env bash
# Adds flash-attn to the training environment; it needs torch and nvcc there before it can be built. Snakemake runs this
# in the environment it has just made. Where that machine has no GPU, run it by hand on one that has, in the activated
# environment: bash envs/train.post-deploy.sh
set -euo pipefail

VERSION=2.8.3.post2

if ! command -v nvcc > /dev/null; then
    echo "flash-attn is left out: there is no nvcc in this environment. Training works without it."
    exit 0
fi
if ! nvidia-smi --list-gpus > /dev/null 2>&1; then
    echo "flash-attn is left out: this machine has no NVIDIA GPU. Training works without it."
    exit 0
fi

echo "Building flash-attn $VERSION, which can take an hour; set MAX_JOBS to limit the memory it uses (about 9 GB a job)."
python -m pip install --no-build-isolation --no-deps "flash-attn==$VERSION"
python -c "import flash_attn; print('flash-attn', flash_attn.__version__, 'works.')"

"""MGM, Mini-Gemini, and the workflow around it: data in, a trained and measured model out."""

import os

# How long a thread of torch's OpenMP spins at a barrier before it sleeps: the default, 300,000 turns, takes a core from
# every other process (docs/performance.md). OpenMP reads it when torch is imported; stages inherit it from Snakemake.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "300"

# Batches differ in length; without it, GPU memory that was reserved for one length is lost to the others. PyTorch may
# read it as soon as it is imported.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

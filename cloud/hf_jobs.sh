#!/usr/bin/env bash
# Starts a job of Hugging Face (https://huggingface.co/docs/huggingface_hub/guides/jobs), which costs money:
#   hf buckets create dj2mgm-results
#   export IMAGE=registry.example.org/dj2mgm:latest SOURCE=https://git.example.org/me/dj2mgm
#   CONFIG='model=qwen3-vl-2b dataset=llava-pretrain' cloud/hf_jobs.sh baseline dj_synth
# IMAGE is built from the Dockerfile and pushed to a registry; the job clones SOURCE. The bucket BUCKET keeps the results:
# the same command goes on from them. `cloud/hf_jobs.sh --dry-run …` only prints the job.
set -euo pipefail

dry_run=()
if [ "${1:-}" = --dry-run ]; then
    dry_run=(--dry-run)
    shift
fi
source=${SOURCE:?names the git repository of the workflow}
exec hf jobs run ${dry_run[@]:+"${dry_run[@]}"} --detach --name dj2mgm \
    --flavor "${FLAVOR:-l4x1}" --timeout "${TIMEOUT:-4h}" --secrets HF_TOKEN --env CONFIG="${CONFIG:-}" \
    --volume "hf://buckets/${BUCKET:-dj2mgm-results}:/kept" \
    "${IMAGE:?names the container image}" \
    bash -c 'git clone --depth 1 "$0" dj2mgm && cd dj2mgm && cloud/run.sh /kept "$@"' "$source" "$@"

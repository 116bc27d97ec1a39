#!/usr/bin/env bash
# The whole workflow in one job on the local disk of one node: for clusters whose shared filesystem is slow.
#   sbatch --gpus=1 --cpus-per-task=8 --mem=64G --time=1-0 profiles/slurm/on_local_scratch.sh baseline
# Arguments are Snakemake's. The project is copied to $SCRATCH; results come back every $COPY_BACK_S seconds and at the
# end. After a time limit or a failed node, the same command goes on from what came back, on any node where $SCRATCH is
# the same path: training files hold absolute paths, and checkpoints belong to them. The copy on the node is left there.
set -euo pipefail
command -v rsync > /dev/null || { echo "on_local_scratch.sh: $HOSTNAME has no rsync, which it copies with" >&2; exit 1; }
scratch=${SCRATCH:-/scratch/$USER}/dj2mgm
interval_s=${COPY_BACK_S:-300}
home=$PWD   # where sbatch was called: the project on the shared filesystem

mkdir -p "$scratch"
# what came back is the truth, also where this node has a copy that an earlier job left
rsync --archive --delete --exclude=/.git --exclude=/.venv "$home/" "$scratch/"
mkdir -p "$scratch/results" "$scratch/.snakemake"

# Files come back whole or not at all: stages rename them when they are written. A checkpoint counts by its complete.json,
# which comes after the rest of it and goes before. The lock is this node's.
copy() { rsync --archive --exclude=/.snakemake/locks "$@" "$scratch/results" "$scratch/.snakemake" "$home/"; }
marks_in() { (cd "$1" && find results -name complete.json); }
copy_back() {
    local marks mark
    marks=$(marks_in "$scratch")
    copy --exclude=complete.json || return 0   # something was removed meanwhile: next time
    rsync --archive --files-from=- "$scratch/" "$home/" <<< "$marks" || return 0
    marks_in "$home" | while read -r mark; do test -e "$scratch/$mark" || rm -f "$home/$mark"; done
    copy --exclude=complete.json --delete || true
}
(while sleep "$interval_s"; do copy_back; done) &
copying=$!
# the copier's children, rsync among them, must not write beside the last copy
trap '{ pkill -P $copying; kill $copying; wait $copying; } || true; copy_back' EXIT

cd "$scratch"
snakemake --cores 1 "$@"

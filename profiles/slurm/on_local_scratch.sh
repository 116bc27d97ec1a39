#!/usr/bin/env bash
# The whole workflow in one job on the local disk of one node: for clusters whose shared filesystem is slow.
#   sbatch --gpus=1 --cpus-per-task=8 --mem=64G --time=1-0 profiles/slurm/on_local_scratch.sh baseline
# Arguments are Snakemake's. The project is copied to $SCRATCH; results come back every $COPY_BACK_S seconds and at the
# end. After a time limit or a failed node, the same command goes on from what came back, on any node where $SCRATCH is
# the same path: training files hold absolute paths, and checkpoints belong to them. The copy on the node is left there.
set -euo pipefail
say() { echo "on_local_scratch.sh: $*" >&2; }
command -v rsync > /dev/null || { say "$HOSTNAME has no rsync, which it copies with"; exit 1; }
home=$PWD   # where sbatch was called: the project on the shared filesystem
# each clone has a folder of its own, of the same name on every node
scratch=${SCRATCH:-/scratch/$USER}/dj2mgm/$(sha256sum <<< "$home" | cut -c1-12)
interval_s=${COPY_BACK_S:-300}
job=$home/.on_local_scratch   # which job is at work for it

# One at a time: a job removes from the shared filesystem what it does not have.
if ! (set -o noclobber; echo "$SLURM_JOB_ID" > "$job") 2> /dev/null; then
    if other=$(cat "$job") && [[ $other != "$SLURM_JOB_ID" ]] && squeue --noheader --jobs="$other" 2> /dev/null | grep -q .; then
        say "job $other is at work for $home; wait for it, or name both targets in one job"
        exit 1
    fi
    echo "$SLURM_JOB_ID" > "$job"   # the other one was killed
fi
mkdir -p "$home/.snakemake"
exec {lock}>> "$home/.snakemake/owner.lock"   # Snakemake's in this project, held until this job ends
# a job that Slurm has ended may still copy its results back
if ! flock --timeout "${LOCK_WAIT_S:-60}" $lock; then
    rm -f "$job"
    say "Snakemake is at work in $home; wait for it, or end it first"
    exit 1
fi

mkdir -p "$scratch"
# what came back is the truth, also where this node has a copy that an earlier job left
rsync --archive --delete --exclude=/.git --exclude=/.venv --exclude='/.snakemake/owner.*' --exclude="/${job##*/}" "$home/" "$scratch/"
mkdir -p "$scratch/results" "$scratch/.snakemake"

# Files come back whole or not at all: stages rename them when they are written. A checkpoint counts by its complete.json,
# which comes after the rest of it and goes before. The lock and its owner are this node's.
copy() { rsync --archive --exclude='/.snakemake/owner.*' "$@" "$scratch/results" "$scratch/.snakemake" "$home/"; }
marks_in() { (cd "$1" && find results -name complete.json); }
copy_back() {   # fails, too, where a stage removes something meanwhile
    local marks mark
    marks=$(marks_in "$scratch") || return 1
    copy --exclude=complete.json || return 1
    rsync --archive --files-from=- "$scratch/" "$home/" <<< "$marks" || return 1
    marks_in "$home" | while read -r mark; do test -e "$scratch/$mark" || rm -f "$home/$mark"; done || return 1
    copy --exclude=complete.json --delete
}
(while sleep "$interval_s"; do copy_back || say "not all results came back; the next copy is in $interval_s s"; done) &
copying=$!

finish() {
    local status=$?
    # also stop the copier's children, because its rsync must not write during the last copy
    { pkill -P $copying; kill $copying; wait $copying; } || true
    if ! copy_back; then
        say "results did not come back to $home: see rsync's message; they are on $HOSTNAME in $scratch"
        ((status)) || status=1
    fi
    # after this job was killed, the next one may have written its own number and be waiting for the lock
    [[ $(cat "$job" 2> /dev/null) != "$SLURM_JOB_ID" ]] || rm -f "$job"
    exit $status
}
trap finish EXIT

cd "$scratch"
snakemake --cores 1 "$@"

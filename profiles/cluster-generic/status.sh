#!/usr/bin/env bash
# Says whether a job is running (or still waits), a success, or failed.
#   status.sh NUMBER
set -uo pipefail

# Slurm forgets finished jobs after MinJobAge, usually 300 s; Snakemake asks far more often.
if ! state=$(squeue --noheader --states=all --jobs="$1" --format=%T 2>&1); then
    case $state in
        *"Invalid job id"*) state=FORGOTTEN ;;
        *) state=UNREACHABLE ;;   # the controller is busy or restarts: ask again later
    esac
fi
case $state in
    COMPLETED) echo success ;;
    BOOT_FAIL | CANCELLED | DEADLINE | FAILED | FORGOTTEN | NODE_FAIL | OUT_OF_MEMORY | TIMEOUT) echo failed ;;
    *) echo running ;;
esac

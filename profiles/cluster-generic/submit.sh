#!/usr/bin/env bash
# Submits a job script of Snakemake's to Slurm and prints the job's number.
#   submit.sh RULE CPUS MEM_MB MINUTES GPUS SCRIPT
set -euo pipefail
rule=$1 cpus=$2 mem_mb=$3 minutes=$4 gpus=$5 script=$6

options=(--job-name="$rule" --cpus-per-task="$cpus" --mem="$mem_mb" --time="$minutes" --requeue)
((gpus == 0)) || options+=(--gpus="$gpus")
# Add what your cluster needs: --partition=…, --account=…

# The workflow knows its own jobs by this comment, when Snakemake itself was killed.
options+=(--comment="rule_$rule")
mkdir -p .snakemake/cluster_logs
sbatch --parsable --output=".snakemake/cluster_logs/$rule-%j.log" "${options[@]}" "$script" | cut -d ';' -f 1

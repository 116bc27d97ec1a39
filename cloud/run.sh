#!/usr/bin/env bash
# Runs targets of Snakemake on a machine that may be taken away: `cloud/run.sh <folder> <target> …`.
#
# <folder> outlives the machine, such as a mounted bucket. The results are packed into it every SAVE_SECONDS (default
# 600) and at the end. A new machine begins with the last complete pack, so finished stages are not repeated, and
# training goes on from its last checkpoint. CONFIG has keys for --config, quoted as in a shell if they contain blanks: a
# model and a dataset in it are fetched first.
set -uo pipefail

kept=$1
shift
if ! xargs printf '' <<< "${CONFIG:-}"; then # xargs reads quotes, and runs nothing that is in them
    echo "CONFIG: a quote is not closed; write it like \"model=tiny 'finetune={epochs: 2}'\"" >&2
    exit 2
fi
mapfile -d '' -t config < <(xargs --no-run-if-empty printf '%s\0' <<< "${CONFIG:-}")
mkdir -p "$kept" results .snakemake

# One file, because buckets keep neither times nor links of files. Two names in turn, because a machine may be taken away
# while it writes; `latest` names the complete one. Snakemake's marks of unfinished jobs are read before the results and after
# them, so that no job that starts or ends meanwhile is taken for finished.
save() {
    local name=results.1.tar
    [ "$(cat "$kept/latest" 2> /dev/null)" = "$name" ] && name=results.2.tar
    tar --create --file "$kept/$name" --exclude .snakemake/conda --exclude .snakemake/locks \
        --warning=no-file-changed --warning=no-file-removed .snakemake results .snakemake
    [ $? -le 1 ] && echo "$name" > "$kept/latest" # 1: a file changed while it was read, such as a log
}

if [ -f "$kept/latest" ]; then
    tar --extract --file "$kept/$(cat "$kept/latest")" || exit # a part of the results would be taken for all of them
fi
if [ ${#config[@]} -gt 0 ]; then
    snakemake fetch --config "${config[@]}" || exit
fi
( # a pack that is being written is completed, a pause is not
    trap 'kill $(jobs -p); exit' TERM
    while :; do
        sleep "${SAVE_SECONDS:-600}" &
        wait $!
        save
    done
) &
saving=$!
snakemake --cores all "$@" ${config[@]:+--config "${config[@]}"}
status=$?
kill "$saving"
wait "$saving" 2> /dev/null
save
exit $status

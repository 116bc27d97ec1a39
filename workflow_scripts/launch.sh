#!/bin/bash
# Start a training script with one process for each GPU:
# - one GPU: the script itself;
# - several GPUs of one node: DeepSpeed's launcher;
# - several nodes, in a job of Slurm: srun and torchrun.
#
#     bash workflow_scripts/launch.sh GPUS NODES SCRIPT [ARGUMENT...]
#
# Without -P, Python would import a random.py or types.py of the working folder.
set -euo pipefail
if (($# < 3)); then
    echo "usage: bash workflow_scripts/launch.sh GPUS NODES SCRIPT [ARGUMENT...]" >&2
    exit 2
fi
gpus=$1 nodes=$2
shift 2
# A free port, so that two trainings on one node do not share one. It is below the ports of outgoing connections, one of
# which could take it before the processes listen.
port=$(
    python -P - << 'PYTHON'
import random, socket

for port in random.sample(range(20000, 32000), 100):
    try:
        socket.create_server(("", port)).close()
    except OSError:
        continue
    print(port)
    break
else:
    raise SystemExit("error: no port between 20000 and 32000 is free")
PYTHON
)

if ((gpus == 1 && nodes == 1)); then
    # the variables that DeepSpeed's launcher would set, without the seconds in which it imports DeepSpeed
    visible=${CUDA_VISIBLE_DEVICES-0}
    export CUDA_VISIBLE_DEVICES=${visible%%,*} MASTER_ADDR=127.0.0.1 MASTER_PORT=$port
    export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_SIZE=1 CROSS_RANK=0 CROSS_SIZE=1
    exec python -u "$@"
fi
if ((nodes == 1)); then
    # the devices that a scheduler or the user chose; the `deepspeed` command would use the machine's first ones
    devices=$(python -P - "$gpus" << 'PYTHON'
import base64, json, os, sys

gpus, visible = int(sys.argv[1]), os.environ.get("CUDA_VISIBLE_DEVICES")
if visible is None:
    devices = list(range(gpus))
elif visible == "":
    devices = [""] * gpus  # no device, for processes on the CPU
else:
    devices = visible.split(",")[:gpus]
if len(devices) < gpus:
    named = len(devices)
    sys.exit(f"error: gpus: {gpus}, but CUDA_VISIBLE_DEVICES lists only {named} ({visible}); set gpus: {named}")
print(base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode())
PYTHON
    )
    exec python -P -m deepspeed.launcher.launch --world_info "$devices" --master_port "$port" "$@"
fi
if [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "error: nodes: $nodes needs Slurm (snakemake --profile profiles/slurm), but this is not a Slurm job" >&2
    exit 2
fi
read -r names processors <<< "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format="%N %C")"
first=$(scontrol show hostnames "$names" | head -n 1)
exec srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
    --cpus-per-task=$((processors / nodes)) --kill-on-bad-exit \
    python -P -m torch.distributed.run --nnodes="$nodes" --nproc_per_node=$((gpus / nodes)) \
    --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID" --rdzv_endpoint="$first:$port" "$@"

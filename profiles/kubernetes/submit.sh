#!/usr/bin/env bash
# Creates a Kubernetes Job that runs a job script of Snakemake's, and prints its name.
#   submit.sh RULE CPUS MEM_MB MINUTES GPUS SCRIPT
set -euo pipefail
rule=$1 cpus=$2 mem_mb=$3 minutes=$4 gpus=$5 script=$6

image=registry.example.org/dj2mgm:latest   # built from the project's Dockerfile
claim=dj2mgm                               # a ReadWriteMany volume, with the project in it
mount=/dj2mgm                              # where the volume is, here and in the jobs

quoted() { printf "'%s'" "${1//\'/\'\'}"; }   # as a text of YAML

limits="cpu: $cpus, memory: ${mem_mb}M"
((gpus == 0)) || limits+=", nvidia.com/gpu: $gpus"

# Snakemake tries again by itself, with more memory: backoffLimit 0. Limits without requests are requests as well.
# PyTorch's loaders hand images over through /dev/shm, where Kubernetes gives 64 MB by default.
kubectl create --output=name --filename=- <<JOB
apiVersion: batch/v1
kind: Job
metadata:
  generateName: dj2mgm-${rule//_/-}-
  labels: {app: dj2mgm, rule: $rule}
spec:
  backoffLimit: 0
  ttlSecondsAfterFinished: 604800
  template:
    metadata:
      labels: {app: dj2mgm, rule: $rule}
    spec:
      restartPolicy: Never
      activeDeadlineSeconds: $((minutes * 60))   # of the pod: the job's own would count the wait for a GPU, too
      containers:
        - name: stage
          image: $image
          command: [$(quoted "$script")]
          workingDir: $(quoted "$PWD")
          resources:
            limits: {$limits}
          volumeMounts:
            - {name: project, mountPath: $mount}
            - {name: shared-memory, mountPath: /dev/shm}
      volumes:
        - {name: project, persistentVolumeClaim: {claimName: $claim}}
        - {name: shared-memory, emptyDir: {medium: Memory}}
JOB

#!/usr/bin/env bash
# Says whether a Job is running (or still waits), a success, or failed.
#   status.sh NAME
set -uo pipefail

if ! conditions=$(kubectl get "$1" --output=jsonpath='{.status.conditions[?(@.status=="True")].type}' 2>&1); then
    case $conditions in
        *NotFound*) conditions=Failed ;;
        *) conditions= ;;   # the cluster cannot be reached: ask again later
    esac
fi
case " $conditions " in
    *" Complete "*) echo success ;;
    *" Failed "*) echo failed ;;
    *) echo running ;;
esac

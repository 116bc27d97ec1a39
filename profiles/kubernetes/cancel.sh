#!/usr/bin/env bash
# Ends Jobs.
#   cancel.sh NAME...
exec kubectl delete --wait=false "$@"

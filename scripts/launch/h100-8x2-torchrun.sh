#!/usr/bin/env bash
# mokbench launch --torchrun configs/h100-8x2.yaml --nodes 2
# 16 ranks, 8 on each of 2 nodes.
# Run it where ssh reaches every host without a password, or run each host's line there.
set -euo pipefail

# On every host.
workdir=$PWD
setup='. /shared/mokbench/.venv/bin/activate
export GLOO_SOCKET_IFNAME=eth0
export NCCL_SOCKET_IFNAME=eth0'

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM

# -tt: what runs on a host ends with its ssh.
on() {
    # shellcheck disable=SC2029  # to be expanded here
    ssh -tt "$1" "set -e
cd $(printf %q "$workdir")
$setup
exec $2" </dev/null &
    pids+=("$!")
}

on node-0 'torchrun --nnodes=2 --nproc-per-node=8 --node-rank=0 --master-addr=node-0 --master-port=29500 -m mokbench run configs/h100-8x2.yaml --only ranks=16'
on node-1 'torchrun --nnodes=2 --nproc-per-node=8 --node-rank=1 --master-addr=node-0 --master-port=29500 -m mokbench run configs/h100-8x2.yaml --only ranks=16'

# When a host is lost the others go on: rank 0 stores which one it was.
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"

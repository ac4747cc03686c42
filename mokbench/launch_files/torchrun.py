"""A script with a torchrun line for each host, started through ssh."""

import shlex
from collections.abc import Iterator

from mokbench.errors import ConfigError
from mokbench.launch_files.job import DEFAULT_PORT, Job

_START = """\
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
"""
_WAIT = """\
# When a host is lost the others go on: rank 0 stores which one it was.
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"
"""


def script(job: Job) -> str:
    """The whole script. Raises ConfigError where the config names too few hosts."""
    hosts = job.cluster.torchrun.hosts
    if len(hosts) < job.nodes:
        raise ConfigError(
            [
                f"{job.config}: cluster.torchrun.hosts names {len(hosts)} hosts and --nodes asks "
                f"for {job.nodes}; list them all, rank 0 stores the rows on the first"
            ]
        )
    workdir = shlex.quote(job.cluster.workdir) if job.cluster.workdir else "$PWD"
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            job.title + "# Run it where ssh reaches every host without a password, or run each "
            "host's line there.",
            "set -euo pipefail",
            "",
            "# On every host.",
            f"workdir={workdir}",
            f"setup={shlex.quote(chr(10).join(job.setup))}",
            "",
            _START,
            *(f"on {host} {shlex.quote(line)}" for host, line in _lines(job, hosts)),
            "",
            _WAIT,
        ]
    )


def _lines(job: Job, hosts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    port = job.cluster.port or DEFAULT_PORT
    names = [host.rpartition("@")[2] for host in hosts]
    for node in range(job.nodes):
        if job.cluster.torchrun.rendezvous == "c10d":
            rendezvous = [
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={names[0]}:{port}",
                f"--rdzv-id={job.name}",
                f"--rdzv-conf=is_host={int(node == 0)}",
                # A host's own name for itself may mean nothing, or loopback, to the others.
                f"--local-addr={names[node]}",
            ]
        else:
            rendezvous = [
                f"--node-rank={node}",
                f"--master-addr={names[0]}",
                f"--master-port={port}",
            ]
        yield hosts[node], f"{job.torchrun(*rendezvous)} {job.run()}"

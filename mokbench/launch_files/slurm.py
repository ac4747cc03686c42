"""An sbatch script: one srun task a rank. Options are those of Slurm 22.05 and newer.

Source: the manual pages of sbatch(1) and srun(1); --segment needs 24.05 and topology/block, and
--container-image and --container-mounts are those of pyxis (github.com/NVIDIA/pyxis).
"""

import shlex
from collections.abc import Iterator

from mokbench.launch_files.job import Job

_DAY_S, _HOUR_S, _MINUTE_S = 86400, 3600, 60


def script(job: Job) -> str:
    """The whole script; sbatch reads it from a file or from standard input."""
    port = job.cluster.port or "$((20000 + SLURM_JOB_ID % 20000))"
    parts = [
        "#!/usr/bin/env bash",
        job.title + "# Submit it from a folder that all nodes share.",
        *(f"#SBATCH {option}" for option in _options(job)),
        "# A lost node fails its row, which names it; Slurm need not end the job for it.",
        "#SBATCH --no-kill",
        "# Started again it would find its run folder there: go on with mokbench launch --resume.",
        "#SBATCH --no-requeue",
        *(f"#SBATCH {option}" for option in job.cluster.slurm.options),
        # Not -u: modules and environments of others stumble over it.
        "set -eo pipefail",
        "",
        *([f"cd -- {shlex.quote(job.cluster.workdir)}"] if job.cluster.workdir else []),
        # With a container they belong inside of it.
        *([] if job.cluster.slurm.container else job.setup),
        "# Ranks meet on the first node, where rank 0 runs and stores the rows.",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        f"MASTER_PORT={port}",
        "export MASTER_ADDR MASTER_PORT",
        "",
        *_srun(job),
    ]
    return "\n".join(parts) + "\n"


def _options(job: Job) -> Iterator[str]:
    cluster, slurm = job.cluster, job.cluster.slurm
    yield f"--job-name={job.name}"
    yield "--output=%x-%j.out"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={cluster.ranks_per_node}"
    if job.on_gpus:
        yield f"--gpus-per-node={cluster.ranks_per_node}"
    if slurm.cpus_per_rank:
        yield f"--cpus-per-task={slurm.cpus_per_rank}"
    if slurm.exclusive:
        yield "--exclusive"
        yield "--mem=0"
    if cluster.time_limit_s:
        yield f"--time={_duration(cluster.time_limit_s)}"
    for name in ("partition", "account", "qos", "reservation", "constraint", "segment"):
        if value := getattr(slurm, name):
            yield f"--{name}={value}"


def _duration(seconds: float) -> str:
    """D-HH:MM:SS, rounded up to a minute, which is what Slurm counts in."""
    minutes = -(-int(-(-seconds // 1)) // _MINUTE_S)
    days, minutes = divmod(minutes, _DAY_S // _MINUTE_S)
    hours, minutes = divmod(minutes, _HOUR_S // _MINUTE_S)
    return f"{days}-{hours:02}:{minutes:02}:00"


def _srun(job: Job) -> Iterator[str]:
    slurm = job.cluster.slurm
    options = ["--distribution=block", "--no-kill", "--kill-on-bad-exit=0"]
    # From 22.05 on srun does not take it from the job.
    cores = slurm.cpus_per_rank
    options.append(f"--cpus-per-task={cores}" if cores else "--cpu-bind=none")
    if job.on_gpus:
        yield "# Every task sees all GPUs of its node: bound to one each, ranks could not reach one"
        yield "# another's memory."
        options.append("--gpu-bind=none")
    run = "mokbench " + job.run()
    if "--out" not in job.arguments and "--resume" not in job.arguments:
        run += f' --out "results/runs/{job.name}-$SLURM_JOB_ID"'
    if slurm.container:
        mounts = shlex.quote(",".join(slurm.mounts)) if slurm.mounts else '"$PWD:$PWD"'
        options.append(f"--container-image={shlex.quote(slurm.container)}")
        options.append(f"--container-mounts={mounts}")
        options.append('--container-workdir="$PWD"')
        run = f"bash -c {shlex.quote(chr(10).join(['set -e', *job.setup, f'exec {run}']))}"
    yield f"exec srun {' '.join(options)} \\"
    yield f"    {run}"

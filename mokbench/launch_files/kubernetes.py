"""A Kubeflow PyTorchJob (kubeflow.org/v1), with the config in a ConfigMap beside it.

Sources: the training operator (github.com/kubeflow/trainer, release-1.9), which gives every pod
RANK, the pod's number while nprocPerNode is left out, makes a Service JOB-master-0, and knows its
container by the name pytorch and its port by the name pytorchjob-port; Kubernetes' rules for
$(NAME) in a command; NVIDIA's DRA driver for ComputeDomains.
"""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from mokbench.cluster import Kubernetes
from mokbench.config import parse
from mokbench.errors import ConfigError
from mokbench.launch_files.job import DEFAULT_PORT, Job

_CONFIG_FOLDER = "/etc/mokbench"
_WORK_FOLDER = "/work"
# Names of pods and of the Service end in -master-0 or -worker-NUMBER and are DNS labels.
_MAX_NAME_CHARS = 48
_OTHER_ENDS = set("\x85\u2028\u2029\ufeff")


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, and nothing by reference: for people to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # YAML reads NEL and its like as line ends, which only quotes with escapes keep apart.
    style = '"' if set(text) & _OTHER_ENDS else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def manifest(job: Job) -> str:
    """Both objects as YAML. Raises ConfigError where the config cannot travel into pods."""
    k8s = job.cluster.k8s
    if k8s is None:
        raise ConfigError(
            [f"{job.config}: --k8s needs cluster.k8s with image and claim; see configs/README.md"]
        )
    _check_travels(job)
    metadata = {"name": object_name(job)}
    if k8s.namespace:
        metadata["namespace"] = k8s.namespace
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {_config_key(job): job.text},
    }
    # cleanPodPolicy None: when a pod is lost the others go on, rank 0 stores which one it was.
    policy: dict[str, Any] = {"cleanPodPolicy": "None", "backoffLimit": 0}
    if job.cluster.time_limit_s:
        policy["activeDeadlineSeconds"] = math.ceil(job.cluster.time_limit_s)
    replicas = {"Master": _replicas(job, k8s, 1)}
    if job.nodes > 1:
        replicas["Worker"] = _replicas(job, k8s, job.nodes - 1)
    pytorch_job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }
    objects = yaml.dump_all(
        [config_map, pytorch_job], Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True
    )
    return f"{job.title}# Submit it with kubectl create -f.\n{objects}"


def object_name(job: Job) -> str:
    """Name of the job and of its ConfigMap: a DNS label that starts with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", f"mokbench-{job.name.lower()}")
    return name[:_MAX_NAME_CHARS].strip("-")


def _config_key(job: Job) -> str:
    return f"{job.name}.yaml"


def _check_travels(job: Job) -> None:
    """Pods get the config's text alone: a file that it names from its own folder stays behind."""
    try:
        parse(job.text, Path(_CONFIG_FOLDER) / _config_key(job))
    except ConfigError as error:
        raise ConfigError(
            [
                f"{job.config}: pods get this file only, in {_CONFIG_FOLDER}; give models by sizes "
                "and files by a path of the claim that is the same here",
                *error.problems,
            ]
        ) from None


def _replicas(job: Job, k8s: Kubernetes, number: int) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "containers": [_container(job, k8s)],
        "volumes": [
            {"name": "config", "configMap": {"name": object_name(job)}},
            {"name": "work", "persistentVolumeClaim": {"claimName": k8s.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": k8s.shm}},
        ],
    }
    if k8s.node_selector:
        pod["nodeSelector"] = k8s.node_selector
    if k8s.pull_secret:
        pod["imagePullSecrets"] = [{"name": k8s.pull_secret}]
    if k8s.claim_template:
        pod["resourceClaims"] = [
            {"name": "nvlink", "resourceClaimTemplateName": k8s.claim_template}
        ]
    return {
        "replicas": number,
        "restartPolicy": "Never",
        # A sidecar would stand between the ranks.
        "template": {
            "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},
            "spec": pod,
        },
    }


def _container(job: Job, k8s: Kubernetes) -> dict[str, Any]:
    workdir = job.cluster.workdir or _WORK_FOLDER
    limits = {"nvidia.com/gpu": str(job.cluster.ranks_per_node)} if job.on_gpus else {}
    resources: dict[str, Any] = {"limits": limits | k8s.limits}
    if k8s.claim_template:
        resources["claims"] = [{"name": "nvlink"}]
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": k8s.image,
        "command": ["bash", "-c", _unexpanded(_script(job))],
        "workingDir": workdir,
        "ports": [{"name": "pytorchjob-port", "containerPort": job.cluster.port or DEFAULT_PORT}],
        "resources": resources,
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG_FOLDER},
            {"name": "work", "mountPath": workdir},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if k8s.ipc_lock:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return container


def _script(job: Job) -> str:
    line = job.torchrun(
        '--node-rank="$RANK"',
        # Not MASTER_ADDR: some versions give the master's own pod localhost.
        f"--master-addr={object_name(job)}-master-0",
        f"--master-port={job.cluster.port or DEFAULT_PORT}",
    )
    config = f"{_CONFIG_FOLDER}/{_config_key(job)}"
    return "\n".join(["set -e", *job.setup, f"exec {line} {job.run(config)}"]) + "\n"


def _unexpanded(text: str) -> str:
    """Text that Kubernetes leaves alone: it reads $(NAME) as a variable and $$ as a dollar."""
    return re.sub(r"\$(?=[$(])", "$$", text)

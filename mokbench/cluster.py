"""The cluster section of a config: where its ranks run, for ``mokbench launch`` and dry runs."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from mokbench.quantity import WHOLE, Seconds, Switch, allowed
from mokbench.section import Many, OneOf, Section

# Compute capability, https://developer.nvidia.com/cuda-gpus (read 2026-12-03).
CAPABILITIES = {
    "A100": (8, 0),
    "H100": (9, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "B300": (10, 3),
    "GB300": (10, 3),
}
# GPUs of a rack that NVLink joins over its nodes, https://www.nvidia.com/en-us/data-center/gb200-nvl72
# and gb300-nvl72 (read 2026-12-03).
_RACK_GPUS = {"GB200": 72, "GB300": 72}


class Matching:
    """Marks text of one form; a whole number counts as the text that it was written as."""

    def __init__(self, pattern: str, meaning: str) -> None:
        self._pattern, self._meaning = pattern, meaning

    def _read(self, value: Any) -> str:
        text = str(value) if type(value) is int else value
        if isinstance(text, str) and re.fullmatch(self._pattern, text):
            return text
        raise allowed(self._meaning)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        text = {"type": "string", "pattern": f"^(?:{self._pattern})$"}
        return {"anyOf": [text, {"type": "integer"}]}


class Keys:
    """Tells the JSON schema the form of a mapping's keys, which the key's type checks."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(core), "propertyNames": {"pattern": f"^(?:{self._pattern})$"}}


# What an #SBATCH line can hold as it is: sbatch reads those lines by rules of its own.
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.,:@%/+&|*()\[\]!-]*"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_LABEL_KEY = r"(?:[a-z0-9][a-z0-9.-]*/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?"
# Neither a C string nor UTF-8 holds these.
_NOT_TEXT = r"\x00\ud800-\udfff"

Word = Annotated[str, Matching(_WORD, "one word, without spaces and quotes")]
Constraint = Annotated[
    str, Matching(rf"[\[(]*{_WORD}", "node features without spaces and quotes, as in [a|b]&c")
]
SbatchOption = Annotated[
    str, Matching(rf"--[a-z][a-z-]*(?:={_WORD})?", "an option of sbatch, as in --mail-type=END")
]
Line = Annotated[
    str, Matching(rf"[^{_NOT_TEXT}\x01-\x1f\x7f]+", "text on one line, without control characters")
]
Value = Annotated[
    str, Matching(rf"[^{_NOT_TEXT}]*", "text or a whole number; put anything else in quotes")
]
VariableName = Annotated[str, Matching(_VARIABLE, "the name of an environment variable")]
Variables = Annotated[dict[VariableName, Value], Keys(_VARIABLE)]
# No leading dash: ssh would take such a host for an option.
Host = Annotated[
    str,
    Matching(
        r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9.:_-]*",
        "a host as ssh knows it: NAME, ADDRESS or USER@NAME",
    ),
]
Label = Annotated[str, Matching(_LABEL, "a Kubernetes name: a-z, 0-9 and '-', at most 63 of them")]
LabelKey = Annotated[str, Matching(_LABEL_KEY, "a Kubernetes key, as in nvidia.com/gpu.product")]
LabelValue = Annotated[
    str,
    Matching(
        r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?",
        "a Kubernetes label's value: letters, digits, '.', '_' and '-', at most 63",
    ),
]
Quantity = Annotated[str, Matching(r"[1-9][0-9]*(?:[KMGT]i?)?", "a size such as 16Gi, or a count")]
Count = Annotated[int, Field(ge=1, le=1024), WHOLE]
Port = Annotated[int, Field(ge=1024, le=65535), WHOLE]
GpuName = Annotated[str, OneOf(CAPABILITIES)]


class Slurm(Section):
    """What sbatch and srun are asked for; a key left out leaves it to the site's default."""

    partition: Word | None = Field(None, description="--partition")
    account: Word | None = Field(None, description="--account")
    qos: Word | None = Field(None, description="--qos")
    reservation: Word | None = Field(None, description="--reservation")
    constraint: Constraint | None = Field(None, description="--constraint")
    segment: Count | None = Field(
        None, description="--segment: nodes that lie in one block, as of an NVL72 rack"
    )
    exclusive: Switch = Field(True, description="whole nodes, with all of their memory")
    cpus_per_rank: Count | None = Field(
        None, description="--cpus-per-task; default: ranks share all cores of the job, not bound"
    )
    container: Line | None = Field(None, description="image for pyxis (srun --container-image)")
    mounts: Many[Line] = Field(
        (), description="SOURCE:TARGET for pyxis; default the working folder"
    )
    options: Many[SbatchOption] = Field((), description="more options of sbatch")


class Torchrun(Section):
    """Hosts that torchrun is started on through ssh."""

    hosts: Many[Host] = Field((), description="first: rank 0, which stores the rows")
    rendezvous: Literal["static", "c10d"] = Field(
        "static",
        description="static: node ranks in the order of hosts; c10d: torchrun deals them out",
    )


class Kubernetes(Section):
    """A Kubeflow PyTorchJob, one pod a node."""

    image: Line = Field(description="container image with mokbench, torchrun and bash")
    claim: Label = Field(
        description="PersistentVolumeClaim that pods work in; run folders outlive them there"
    )
    namespace: Label | None = Field(None, description="default: kubectl's own")
    shm: Quantity = Field("16Gi", description="size of /dev/shm; Kubernetes gives 64Mi")
    node_selector: Annotated[dict[LabelKey, LabelValue], Keys(_LABEL_KEY)] = Field(
        default_factory=dict, description="labels of the nodes to use"
    )
    limits: Annotated[dict[LabelKey, Quantity], Keys(_LABEL_KEY)] = Field(
        default_factory=dict, description="more resources of each pod, as in rdma/ib: 8"
    )
    ipc_lock: Switch = Field(False, description="capability IPC_LOCK, which RDMA needs")
    claim_template: Label | None = Field(
        None, description="ResourceClaimTemplate of a ComputeDomain (NVLink across nodes)"
    )
    pull_secret: Label | None = Field(None, description="Secret for the image's registry")


class Cluster(Section):
    """Nodes for a run of several ranks each; slurm, torchrun and k8s say how to get them."""

    ranks_per_node: Count = Field(description="ranks, and GPUs, of each node")
    gpu: GpuName | None = Field(
        None, description="what the nodes have; dry runs elsewhere then say what runs there"
    )
    time_limit_s: Seconds | None = Field(
        None, alias="time_limit", description="the job ends after this, for Slurm and k8s"
    )
    interface: Line | None = Field(
        None, description="network between nodes: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )
    port: Port | None = Field(
        None, description="where ranks meet; default by Slurm's job id, elsewhere 29500"
    )
    venv: Line | None = Field(None, description="virtual environment, at the same path everywhere")
    setup: Many[Line] = Field((), description="shell lines before mokbench, as in module load cuda")
    env: Variables = Field(default_factory=dict, description="environment variables of all ranks")
    workdir: Line | None = Field(
        None, description="working folder on every node; default the one launched from"
    )
    slurm: Slurm = Field(default_factory=Slurm, description="for mokbench launch --slurm")
    torchrun: Torchrun = Field(
        default_factory=Torchrun, description="for mokbench launch --torchrun"
    )
    k8s: Kubernetes | None = Field(None, description="for mokbench launch --k8s")

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of ``gpu``, None where it is not given."""
        return CAPABILITIES[self.gpu] if self.gpu else None

    def is_one_domain(self, ranks: int) -> bool:
        """Whether NVLink can join so many ranks of several nodes, if they are of one rack."""
        return ranks <= _RACK_GPUS.get(self.gpu or "", 0)

    @property
    def variables(self) -> dict[str, str]:
        """Environment of all ranks; ``env`` stands over ``interface``."""
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if self.interface else ()
        return {name: str(self.interface) for name in names} | self.env

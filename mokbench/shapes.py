"""Model shapes: by published name (shapes.yaml), inline, or from a Hugging Face config.json."""

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from mokbench import yaml_source
from mokbench.problems import Problems, suggest
from mokbench.quantity import WHOLE, FileSafeName, allowed
from mokbench.workload import Model

MAX_JSON_BYTES = 4 << 20

# Names the field uses for the same thing, most specific first: a dense layer's intermediate_size
# only counts where no expert's size is given (Mixtral, gpt-oss, Llama 4).
HF_KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "d_model", "model_dim", "n_embd"),
    "intermediate": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_ffn_hidden_size",
        "expert_intermediate_size",
        "ffn_hidden_size",
        "intermediate_size",
    ),
    "experts": (
        "n_routed_experts",
        "num_local_experts",
        "num_experts",
        "moe_num_experts",
        "num_moe_experts",
    ),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "num_selected_experts",
        "top_k",
    ),
}
HF_SECTIONS = ("text_config", "llm_config", "language_config", "ffn_config")


class Shape(BaseModel):
    """Shape of one MoE layer as a config gives it; ``model`` is the same as a plain value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: FileSafeName | None = Field(None, description="name in cell ids")
    hidden: Annotated[int, Field(ge=64, le=65536, multiple_of=64), WHOLE]
    intermediate: Annotated[int, Field(ge=64, le=262144, multiple_of=64), WHOLE]
    experts: Annotated[int, Field(ge=1, le=1024), WHOLE]
    top_k: Annotated[int, Field(ge=1, le=16), WHOLE]

    @field_validator("top_k")
    @classmethod
    def _within_experts(cls, top_k: int, info: ValidationInfo) -> int:
        experts = info.data.get("experts")
        if experts is not None and top_k > experts:
            raise allowed(f"at most the number of experts, {experts}")
        return top_k

    @property
    def model(self) -> Model:
        """The workload's type; without a name the sizes are the name."""
        sizes = f"h{self.hidden}-i{self.intermediate}-e{self.experts}-k{self.top_k}"
        return Model(self.name or sizes, self.hidden, self.intermediate, self.experts, self.top_k)


class PublishedShape(BaseModel):
    """One entry of shapes.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden: int
    intermediate: int | None = None
    experts: int
    top_k: int
    source: str
    aliases: tuple[str, ...] = ()
    notes: str | None = None
    unusable: str | None = None


@cache
def published() -> dict[str, PublishedShape]:
    """Read all entries of shapes.yaml, by name."""
    source = yaml_source.read(Path(__file__).with_name("shapes.yaml"))
    Problems(source).raise_all()
    return {name: PublishedShape(**entry) for name, entry in source.root.plain().items()}


def read_entry(value: Any, info: ValidationInfo) -> Any:
    """Replace a name or path by the mapping it stands for.

    A path (it has a slash or ends in .json) is relative to ``info.context["folder"]``.
    """
    if not isinstance(value, str | dict | Shape):
        raise allowed("a published name, a config.json path, or a mapping of the sizes")
    if not isinstance(value, str):
        return value
    if "/" in value or value.endswith(".json"):
        folder = (info.context or {}).get("folder", Path())
        return from_file(user_path(folder, value), value)
    return from_name(value)


def user_path(folder: Path, text: str) -> Path:
    """A path of a config: relative to its folder, ~ is a home. Raises ValueError without one."""
    try:
        return Path(folder, Path(text).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{text!r}: {error}") from None


ModelEntry = Annotated[Shape, BeforeValidator(read_entry, json_schema_input_type=str | Shape)]


def from_name(name: str) -> dict[str, Any]:
    """Look a published model up. Raises ValueError with close names where there is none."""
    names: dict[str, str] = {}
    for main, shape in published().items():
        names |= dict.fromkeys((main, *shape.aliases), main)
    key = name.lower()
    if key not in names:
        usable = [name for name, main in names.items() if not published()[main].unusable]
        raise ValueError(
            f"unknown model {name!r}; {suggest(name, usable)}, or a mapping of hidden, "
            "intermediate, experts and top_k, or the path of a Hugging Face config.json"
        )
    shape = published()[names[key]]
    if shape.unusable:
        raise ValueError(f"model {name!r} cannot be used by name: {shape.unusable}")
    sizes = shape.model_dump(include={"hidden", "intermediate", "experts", "top_k"})
    return {"name": key, **sizes}


def from_file(path: Path, shown: str) -> dict[str, Any]:
    """Read a Hugging Face config.json (or the one in a folder).

    Raises ValueError that names the file and what is missing in it.
    """
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"no file {path} (from {shown!r}); allowed: the path of a config.json")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{path} is larger than {MAX_JSON_BYTES} bytes: no config.json")
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except (UnicodeDecodeError, RecursionError):
        raise ValueError(f"{path}: not JSON text") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds no JSON object; allowed: a Hugging Face config.json")
    stem = path.parent.resolve().name if path.name == "config.json" else path.stem
    return {"name": file_safe(stem), **hf_sizes(data, str(path))}


def hf_sizes(data: dict[str, Any], file: str) -> dict[str, Any]:
    """Pick hidden, intermediate, experts and top_k, also from nested sections."""
    sections = [data, *(data[name] for name in HF_SECTIONS if isinstance(data.get(name), dict))]
    sizes, missing = {}, []
    for field, keys in HF_KEYS.items():
        found = [section[key] for key in keys for section in sections if _given(section.get(key))]
        if found:
            sizes[field] = _one(found[0], field, file)
        else:
            missing.append(f"{field} (looked for {', '.join(keys)})")
    if missing:
        raise ValueError(
            f"{file} lacks {'; '.join(missing)}, at the top or in {', '.join(HF_SECTIONS)}; "
            "is it the config of a mixture-of-experts model? Give the sizes inline instead"
        )
    return sizes


def _given(value: Any) -> bool:
    return value is not None and value != []


def _one(value: Any, field: str, file: str) -> Any:
    """Take a list of one size a layer (Hunyuan, ERNIE) as one where all are the same."""
    if not isinstance(value, list):
        return value
    if any(item != value[0] for item in value):
        raise ValueError(f"{file}: {field} differs between layers: {value}; give one layer inline")
    return value[0]


def file_safe(text: str) -> str:
    """Lower case, with everything that a file name or cell id should not hold replaced by ``-``."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text.lower())
    return kept.strip("._-")[:64] or "model"

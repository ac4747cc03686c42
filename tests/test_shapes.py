"""Published shapes, inline shapes and Hugging Face configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from mokbench import config, shapes
from mokbench.errors import ConfigError
from mokbench.workload import Model

# The table of published shapes, written down a second time and by hand.
TABLE = {
    "deepseek-v3": (7168, 2048, 256, 8),
    "deepseek-v4-flash": (4096, 2048, 256, 6),
    "deepseek-v4-pro": (7168, 3072, 384, 6),
    "deepseek-v4.1-flash": (5120, 2304, 384, 6),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "qwen3-next-80b": (2048, 512, 512, 10),
    "qwen3.5-35b-a3b": (2048, 512, 256, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "kimi-k2": (7168, 2048, 384, 8),
    "glm-4.5-air": (4096, 1408, 128, 8),
    "glm-4.5": (5120, 1536, 160, 8),
    "glm-5": (6144, 2048, 256, 8),
    "llama-4-maverick": (5120, 8192, 128, 1),
    "olmoe-1b-7b": (2048, 1024, 64, 8),
    "minimax-m2": (3072, 1536, 256, 8),
}


def model_of(value: str, folder: Path = Path()) -> Model:
    text = f"ranks: 1\ntokens_per_rank: 1\nsystems: mok\nmodel: {value}\n"
    suite = config.parse(text, folder / "c.yaml")
    (track,) = (track for track in suite.tracks if track.axes == ("model",))
    model: Model = track.rows[0][0]
    return model


def errors_of(value: str, folder: Path = Path()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        model_of(value, folder)
    return caught.value.problems


@pytest.mark.parametrize("name", TABLE)
def test_published_shapes(name: str) -> None:
    assert model_of(name) == Model(name, *TABLE[name])


def test_the_table_is_complete_and_every_entry_has_a_source() -> None:
    entries = shapes.published()
    assert {name for name, entry in entries.items() if not entry.unusable} == set(TABLE)
    assert all(len(entry.source) > 10 for entry in entries.values())
    assert "not verified" in (entries["olmoe-1b-7b"].notes or "")


def test_aliases_and_case() -> None:
    assert model_of("deepseek-r1") == Model("deepseek-r1", 7168, 2048, 256, 8)
    assert model_of("GLM-4.6") == Model("glm-4.6", 5120, 1536, 160, 8)
    assert model_of("Qwen3-30B-A3B") == Model("qwen3-30b-a3b", 2048, 768, 128, 8)


def test_unknown_and_unusable_names() -> None:
    (line,) = errors_of("deepsek-v3")
    assert line.startswith(
        "c.yaml:4:8: model: unknown model 'deepsek-v3'; did you mean deepseek-v3"
    )
    assert "longcat" not in line
    (line,) = errors_of("longcat-flash")
    assert "cannot be used by name: its expert intermediate size is not known" in line
    (line,) = errors_of("7")
    assert "found 7; allowed: a published name, a config.json path, or a mapping" in line


def test_inline_shapes() -> None:
    sizes = "hidden: 512, intermediate: 256, experts: 32, top_k: 4"
    assert model_of(f"{{{sizes}}}") == Model("h512-i256-e32-k4", 512, 256, 32, 4)
    assert model_of(f"{{name: tiny, {sizes}}}") == Model("tiny", 512, 256, 32, 4)
    assert model_of(f"{{name: 7, {sizes}}}").name == "7"
    assert model_of("{hidden: 64, intermediate: 1.28e2, experts: 1, top_k: 1}").intermediate == 128


def test_every_fault_of_an_inline_shape_is_named() -> None:
    lines = errors_of("{name: a/b, hidden: 100, intermediate: 0, experts: 8, top_k: 9, layer: 1}")
    assert [line.split(": ", 2)[1] for line in lines] == [
        "model.name",
        "model.hidden",
        "model.intermediate",
        "model.top_k",
        "model.layer",
    ]
    assert "found 100; allowed: a multiple of 64" in lines[1]
    assert "found 9; allowed: at most the number of experts, 8" in lines[3]
    assert "unknown key" in lines[4]
    lines = errors_of("{hidden: 64, experts: 1025, top_k: 17}")
    assert [line.split("model", 1)[1] for line in lines] == [
        ".intermediate: missing",
        ".experts: found 1025; allowed: at most 1024",
        ".top_k: found 17; allowed: at most 16",
    ]


HF: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "mixtral": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}
        | {"num_experts_per_tok": 2},
        (4096, 14336, 8, 2),
    ),
    "qwen3": (
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
        | {"num_experts": 128, "num_experts_per_tok": 8},
        (2048, 768, 128, 8),
    ),
    "deepseek": (
        {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048}
        | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8},
        (7168, 2048, 256, 8),
    ),
    "nested": (
        {
            "model_type": "vision",
            "vision_config": {"hidden_size": 1408, "intermediate_size": 5632},
            "text_config": {"hidden_size": 5120, "intermediate_size": 8192}
            | {"num_local_experts": 128, "num_experts_per_tok": 1},
        },
        (5120, 8192, 128, 1),
    ),
    "dbrx": (
        {
            "d_model": 6144,
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
        (6144, 10752, 16, 4),
    ),
    "by_layer": (
        {"hidden_size": 4096, "moe_intermediate_size": [3072, 3072], "num_experts": 64}
        | {"moe_topk": [8, 8]},
        (4096, 3072, 64, 8),
    ),
    "longcat": (
        {"hidden_size": 6144, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048}
        | {"n_routed_experts": 512, "moe_topk": 12},
        (6144, 2048, 512, 12),
    ),
}


@pytest.mark.parametrize("name", HF)
def test_hugging_face_configs(name: str, tmp_path: Path) -> None:
    data, sizes = HF[name]
    folder = tmp_path / "Some Model-7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    (tmp_path / "other.json").write_text(json.dumps(data))
    expected = Model("some-model-7b", *sizes)
    assert model_of("Some Model-7B/config.json", tmp_path) == expected
    assert model_of("./Some Model-7B", tmp_path) == expected
    assert model_of(str(folder / "config.json")) == expected
    assert model_of("other.json", tmp_path) == Model("other", *sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 64,\n "x" 1}', "bad.json:2:6: not JSON: Expecting ':' delimiter"),
        ("[1]", "bad.json: holds no JSON object"),
        ("", "bad.json:1:1: not JSON"),
        ("[" * 100_000, "not JSON text"),
        ('{"hidden_size": 64, "intermediate_size": 64}', "lacks experts (looked for n_routed_"),
        ('{"num_experts": 8, "num_experts_per_tok": 2}', "lacks hidden (looked for hidden_size"),
    ],
)
def test_bad_hugging_face_configs(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    (line,) = errors_of("bad.json", tmp_path)
    assert f"{tmp_path}/c.yaml:4:8: model: " in line
    assert message in line


def test_values_of_a_hugging_face_config_are_checked_too(tmp_path: Path) -> None:
    data = {"hidden_size": 100, "intermediate_size": True, "num_experts": 4, "top_k": 50}
    (tmp_path / "odd.json").write_text(json.dumps(data))
    lines = errors_of("odd.json", tmp_path)
    assert [line.split(":4:8: ")[1] for line in lines] == [
        "model.hidden (of 'odd.json'): found 100; allowed: a multiple of 64",
        "model.intermediate (of 'odd.json'): found True; allowed: a whole number",
        "model.top_k (of 'odd.json'): found 50; allowed: at most 16",
    ]


def test_bytes_that_are_no_text_and_sizes_that_differ(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "not JSON text" in errors_of("binary.json", tmp_path)[0]
    data = {"hidden_size": 64, "moe_intermediate_size": [64, 128], "num_experts": 4, "moe_k": 2}
    (tmp_path / "mixed.json").write_text(json.dumps(data))
    assert "intermediate differs between layers: [64, 128]" in errors_of("mixed.json", tmp_path)[0]


def test_one_name_may_not_stand_for_two_shapes() -> None:
    one = "{name: tiny, hidden: 64, intermediate: 64, experts: 4, top_k: 1}"
    two = "{name: tiny, hidden: 128, intermediate: 64, experts: 4, top_k: 1}"
    (line,) = errors_of(f"[{one}, {two}]")
    assert line.endswith("model[1]: the name 'tiny' already stands for another model")

"""Configs: what is accepted, and every error with its place, all at once."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from mokbench import cells, config, yaml_source
from mokbench.errors import ConfigError
from mokbench.workload import Regime

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))

GOOD = """\
name: good
ranks: 4
model: {name: tiny, hidden: 512, intermediate: 256, experts: 32, top_k: 4}
systems: [mok, push]
sweep:
  tokens_per_rank: [16, 128]
"""


def problems_of(text: str, path: str | Path = "c.yaml") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, path)
    return caught.value.problems


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_defaults() -> None:
    suite = config.parse(GOOD)
    measure = suite.measure
    assert (suite.name, suite.fabric, suite.require) == ("good", "auto", ())
    assert [(entry.name, entry.variants) for entry in suite.systems] == [
        ("mok", ((),)),
        ("push", ((),)),
    ]
    assert measure.regimes == (Regime.ISOLATED, Regime.STEADY)
    assert (measure.graph, measure.noise, measure.blocks, measure.warmup) == ((False,), 0.02, 6, 3)
    assert (measure.max_time_s, measure.deadline_s, measure.wait_bound_s) == (2.0, 60.0, 10.0)
    assert (measure.signals, measure.min_step) == (True, True)


def test_name_defaults_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "My sweep (2).yaml"
    path.write_text(changed("name: good\n", ""))
    suite = config.load(path)
    assert suite.name == "my-sweep--2"
    assert suite.text == path.read_text()
    assert suite.path == path


def test_values_as_people_mean_them() -> None:
    suite = config.parse(
        changed("ranks: 4", "ranks: [4e0, 0o10, '2']").replace("name: good", "name: no")
        + "seed: 0x10\n"
        + "measure: {noise: 1.5%, max_time: 500ms, deadline: 2 min, wait_bound: 1e-1, graph: no,"
        + " signals: off, min_step: yes, regimes: steady, blocks: 1e1, warmup: 0}\n"
    )
    measure = suite.measure
    assert suite.name == "no"
    assert {cell.workload.ranks for cell in cells.expand(suite)} == {4, 8, 2}
    assert {cell.workload.seed for cell in cells.expand(suite)} == {16}
    assert measure.noise == pytest.approx(0.015)
    assert (measure.max_time_s, measure.deadline_s, measure.wait_bound_s) == (0.5, 120.0, 0.1)
    assert (measure.graph, measure.signals, measure.min_step) == ((False,), False, True)
    assert (measure.regimes, measure.blocks, measure.warmup) == ((Regime.STEADY,), 10, 0)


def test_short_deadline_shortens_the_other_times() -> None:
    measure = config.parse(GOOD + "measure: {deadline: 2s}").measure
    assert (measure.max_time_s, measure.wait_bound_s) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (changed("ranks: 4", "rank: 4"), ":2:1: rank: unknown key; did you mean ranks?"),
        (changed("ranks: 4", "ranks:"), ":2:7: ranks: found nothing; allowed: a whole number"),
        (changed("ranks: 4", "ranks: true"), ":2:8: ranks: found true; allowed: a whole number"),
        (changed("ranks: 4", "ranks: 017"), ":2:8: ranks: found '017'; allowed: a whole number"),
        (changed("ranks: 4", "ranks: .inf"), ":2:8: ranks: found .inf; allowed: a whole number"),
        (changed("ranks: 4", "ranks: []"), ":2:8: ranks: found an empty list; allowed: at least"),
        (changed("ranks: 4", "ranks: [4, 4]"), ":2:12: ranks[1]: 4 is listed twice, first at 2:9"),
        (changed("ranks: 4", "ranks: {a: 1}"), ":2:8: ranks: found a mapping with a; allowed:"),
        (changed("ranks: 4", "ranks: 3"), "ranks: 3 ranks cannot share the 32 experts of tiny eve"),
        (changed("ranks: 4\n", ""), ":1:1: ranks is missing; give it at the top or under sweep"),
        (changed("name: good", "name: a/b"), ":1:7: name: found 'a/b'; allowed: 1 to 64 ASCII"),
        (changed("name: good", "name: ~"), ":1:7: name: found nothing; allowed: 1 to 64 ASCII"),
        (changed("name: good", "fabric: gpu"), ":1:9: fabric: found 'gpu'; allowed: auto, host, c"),
        (changed("top_k: 4", "top_k: 33"), ":3:73: model.top_k: found 33; allowed: at most 16"),
        (changed("32, top_k: 4", "2, top_k: 4"), "top_k: found 4; allowed: at most the number of"),
        (changed("[mok, push]", "[mok, no]"), ":4:16: systems[1]: unknown system 'no'; allowed: m"),
        (changed("[mok, push]", "[mok, mok]"), "mok with the default options is listed twice"),
        (changed("[mok, push]", "[]"), ":4:10: systems: found an empty list"),
        (changed("[mok, push]", "{mok: {}, push: {}}"), "found mok, push; allowed: one system a l"),
        (changed("[mok, push]", "{mok: {block_m: 0}}"), "block_m: found 0; allowed: at least 1"),
        (changed("[mok, push]", "{mok: {blok: 1}}"), ":4:17: systems.mok.blok: unknown key; did y"),
        (changed("[mok, push]", "[mok, {mok: {blok: 1}}]"), "systems[1].mok.blok: unknown key"),
        (GOOD + "routing: [{zipf: 1, x: 2}, {zipf: 1}]", "routing[0].x: unknown key"),
        (changed("[mok, push]", "{mok: {block_m: true}}"), "found true; allowed: a whole number"),
        (changed("[16, 128]", "0"), ":6:20: sweep.tokens_per_rank: found 0 everywhere; allowed: a"),
        (changed("[16, 128]", "[16, -1]"), ":6:25: sweep.tokens_per_rank[1]: found -1; allowed: a"),
        (changed("tokens_per_rank", "tokens"), "sweep.tokens: unknown key; did you mean tokens_pe"),
        (changed("sweep:", "tokens_per_rank: 4\nsweep:"), "already has values at 5:1; give it onc"),
        (GOOD + "require: [alltoall]", "'alltoall' is not under systems; allowed: mok, push"),
        (GOOD + "measure: {max_time: 60}", "max_time: found 60; allowed: less than the deadline, "),
        (GOOD + "measure: {max_time: 1:30}", ":7:21: measure.max_time: found '1:30'; allowed: a d"),
        (GOOD + "measure: {max_time: .nan}", "measure.max_time: found .nan; allowed: "),
        (GOOD + "measure: {noise: 0}", "measure.noise: found 0; allowed: more than 0"),
        (GOOD + "measure: {signals: 1}", "measure.signals: found 1; allowed: true or false (yes"),
        (GOOD + "measure: fast", ":7:10: measure: found 'fast'; allowed: a mapping"),
        (GOOD + "dtype: [bf16, fp31]", "dtype[1]: found 'fp31'; did you mean fp32"),
        (GOOD + "placement: random", "placement: found 'random'; allowed: contiguous, round_robin"),
        (GOOD + "routing: {trace: a.npz}", "routing: no trace file a.npz; allowed: an npz of top-"),
        (GOOD + "routing: balancd", ":7:10: routing: unknown routing 'balancd', did you mean bal"),
        (GOOD + "routing: {zipf: 0.8, masked: 2}", ":7:30: routing.masked: found 2; allowed: at m"),
    ],
)  # fmt: skip
def test_one_problem_one_line(text: str, expected: str) -> None:
    (line,) = problems_of(text)
    assert line.startswith("c.yaml:")
    assert expected in line


def test_all_problems_at_once_in_the_order_of_the_file() -> None:
    lines = problems_of(
        "name: all\n"
        "fabric: cpu\n"
        "ranks: [3, 4, 0]\n"
        "model: [{name: t, hidden: 64, intermediate: 64, experts: 8, top_k: 2}, mixtral]\n"
        "systems: [mok, {push: {ring: 1}}]\n"
        "sweep:\n"
        "  tokens_per_rank: [1, x]\n"
        "  routing: [balanced, balanced]\n"
        "  zip: [{seed: [1, 2], dtype: [bf16]}]\n"
        "measure: {noise: 5, graf: no, deadline: soon}\n"
        "require: push\n"
        "require: mok\n"
    )
    places = [line.split(": ")[0] + " " + line.split(": ")[1] for line in lines]
    assert places == [
        "c.yaml:2:9 fabric",
        "c.yaml:3:9 ranks[0]",
        "c.yaml:3:15 ranks[2]",
        "c.yaml:4:72 model[1]",
        "c.yaml:5:24 systems[1].push.ring",
        "c.yaml:7:24 sweep.tokens_per_rank[1]",
        "c.yaml:8:23 sweep.routing[1]",
        "c.yaml:9:9 sweep.zip[0]",
        "c.yaml:10:18 measure.noise",
        "c.yaml:10:21 measure.graf",
        "c.yaml:10:41 measure.deadline",
        "c.yaml:12:1 duplicate key 'require'; it first stands at 11:1",
    ]
    assert "3 ranks cannot share the 8 experts of t evenly; allowed: 1, 2, 4, 8" in lines[1]
    assert "dtype has 1, seed has 2 values; allowed: lists of one length" in lines[7]


def test_anchors_merge_and_private_keys() -> None:
    suite = config.parse(
        changed("systems: [mok, push]", "x-tiles: &tiles {block_m: [32, 64]}")
        + "systems: [{mok: *tiles}, {push: {<<: *tiles}}]\n"
    )
    assert [entry.variants for entry in suite.systems] == [((("block_m", 32),), ())] * 2


def test_paths_are_relative_to_the_config(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_experts": 8, "top_k": 2}
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    (tmp_path / "routes.npz").write_bytes(b"read by whoever generates the routing")
    text = (
        "ranks: 2\nmodel: shape.json\ntokens_per_rank: 4\nsystems: mok\n"
        "routing: {trace: routes.npz}\n"
    )
    (cell, _) = cells.expand(config.parse(text, tmp_path / "c.yaml"))
    assert cell.workload.routing.trace == str(tmp_path / "routes.npz")
    assert cell.workload.model.hidden == 64
    assert cell.id == "shape.mok.r2.t4.trace-routes-l0.bf16.isolated"


def test_resolved_is_a_config_with_the_same_meaning() -> None:
    text = changed("[mok, push]", "[{mok: {block_m: [32, 64]}}, push]") + (
        "  routing: [typical, {hot_rank: 2, masked: 10%}]\n"
        "  exclude: [{system: push, tokens_per_rank: 16}]\n"
        "  include: [{ranks: 2, system: mok}]\n"
        "measure: {max_time: 300ms, noise: 5%}\n"
    )
    suite = config.parse(text)
    again = config.parse(json.dumps(suite.resolved))
    assert again.measure == suite.measure
    assert cells.expand(again) == cells.expand(suite)
    assert {cell.workload.routing.masked for cell in cells.expand(suite)} == {0.0, 0.1}


def readme_examples() -> list[str]:
    text = (CONFIGS[0].parent / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("example", readme_examples())
def test_examples_of_the_readme_are_configs(example: str, tmp_path: Path) -> None:
    (tmp_path / "r.npz").touch()
    given = yaml.safe_load(example)
    base: dict[str, Any] = {"ranks": 4, "model": "mixtral-8x7b", "tokens_per_rank": 1}
    base["systems"] = ["mok", "push", "alltoall"]
    if "sweep" in given:
        del base["tokens_per_rank"]
    rest = {key: value for key, value in base.items() if key not in given}
    text = example + (yaml.safe_dump(rest) if rest else "")
    assert cells.expand(config.parse(text, tmp_path / "c.yaml"))


def test_a_config_of_a_gpu_comparison(tmp_path: Path) -> None:
    (tmp_path / "layer36.npz").touch()
    text = (
        "name: h200-vs-deepep\nfabric: cuda\nranks: 4\nmodel: deepseek-v3\n"
        "systems: [mok, push, {deepep: {num_sms: [8, 16, auto], gemm: [ours, torch]}}, alltoall]\n"
        "sweep:\n  tokens_per_rank: [1, 128, 1024, 4096]\n"
        "  routing: [balanced, extreme, {hot_rank: 2.5}, {trace: layer36.npz}]\n"
        "  exclude: [{system: alltoall, tokens_per_rank: 1}]\n"
        "measure: {regimes: [isolated, steady], graph: [false, true], noise: 1%, max_time: 20s}\n"
        "require: [mok, deepep]\n"
    )
    suite = config.parse(text, tmp_path / "c.yaml")
    # 9 variants on 16 workloads, less alltoall on 4 of them, in 2 regimes with and without graph.
    assert len(cells.expand(suite, "cuda")) == (9 * 16 - 4) * 4


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load_and_fit_the_schema(path: Path) -> None:
    assert cells.expand(config.load(path))
    schema = config.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml_source.read(path).root.plain(), schema)
    jsonschema.validate(yaml.safe_load(path.read_text()), schema)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"fabric": "gpu"}, "fabric"),
        ({"ranks": 0}, "ranks"),
        ({"rank": 4}, "rank"),
        ({"systems": [{"mok": {"block_m": [0]}}]}, "systems"),
        ({"systems": ["moc"]}, "systems"),
        ({"sweep": {"tokens": [1]}}, "tokens"),
        ({"measure": {"noise": "much"}}, "noise"),
        ({"measure": {"max_time": -1}}, "max_time"),
        ({"routing": [{"zipf": 99}]}, "routing"),
        ({"model": {"hidden": 100}}, "model"),
    ],
)
def test_schema_refuses_what_load_refuses(change: dict[str, Any], where: str) -> None:
    good = yaml.safe_load(GOOD)
    jsonschema.validate(good, config.schema())
    with pytest.raises(jsonschema.ValidationError) as caught:
        jsonschema.validate(good | change, config.schema())
    assert where in str(caught.value.json_path) + caught.value.message
    with pytest.raises(ConfigError):
        config.parse(json.dumps(good | change))

"""YAML as people mean it: types, duplicates, aliases, and hostile files."""

import math
import os
import time
from pathlib import Path

import pytest

from mokbench import yaml_source
from mokbench.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-2.5e+1", -25.0),
        ("4_096", 4096),
        ("0o17", 15),
        ("0x1F", 31),
        ("0b101", 5),
        ("-7", -7),
        ("017", "017"),
        ("1:30", "1:30"),
        ("190:20:30", "190:20:30"),
        ("2026-12-01", "2026-12-01"),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("2%", "2%"),
        ("500ms", "500ms"),
        ("1_000.5", "1_000.5"),
        ("=", "="),
        ("e5", "e5"),
        (".", "."),
        ("-", "-"),
        (".inf", math.inf),
        ("-.inf", -math.inf),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    found = yaml_source.resolve(text)
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(float(yaml_source.resolve(".nan") or 0))


def test_quotes_and_str_tag_make_text() -> None:
    source = yaml_source.parse("a: '4'\nb: \"no\"\nc: !!str 4\nd: |\n  4\n", "f.yaml")
    assert source.root.plain() == {"a": "4", "b": "no", "c": "4", "d": "4\n"}
    assert source.problems == []


def test_name_is_text_whatever_it_looks_like() -> None:
    source = yaml_source.parse("name: 1e3\nother: {name: 2026-12-01}\nlast: 1e3", "f.yaml")
    assert source.root.plain() == {"name": "1e3", "other": {"name": "2026-12-01"}, "last": 1000.0}


def test_places_are_lines_and_columns_from_one() -> None:
    source = yaml_source.parse("a: 1\nb:\n  - x\n  - {c: 2}\n", "f.yaml")
    node, rest = source.find(("b", 1, "c"))
    assert (str(node.place), str(node.key), rest) == ("4:9", "4:6", ())
    node, rest = source.find(("b", 1, "missing", "deeper"))
    assert (str(node.place), rest) == ("4:5", ("missing", "deeper"))


def test_one_value_stands_for_a_list_of_one() -> None:
    source = yaml_source.parse("a: {b: 1}", "f.yaml")
    node, rest = source.find(("a", 0, "b", 0))
    assert (node.value, rest) == (1, ())


def test_duplicate_keys_name_both_places() -> None:
    source = yaml_source.parse("a: 1\nb: {c: 1, d: 2, c: 3}\na: 2\n", "f.yaml")
    found = [(str(place), text) for place, text in source.problems]
    assert found == [
        ("2:17", "duplicate key 'c'; it first stands at 2:5"),
        ("3:1", "duplicate key 'a'; it first stands at 1:1"),
    ]


def test_anchors_and_merge_keys() -> None:
    text = "x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: {<<: [*x, {c: 4, a: 9}]}\nw: *x\n"
    source = yaml_source.parse(text, "f.yaml")
    assert source.problems == []
    assert source.root.plain() == {
        "x": {"a": 1, "b": 2},
        "y": {"a": 1, "b": 3},
        "z": {"a": 1, "b": 2, "c": 4},
        "w": {"a": 1, "b": 2},
    }


def test_removing_through_an_alias_leaves_the_anchor() -> None:
    source = yaml_source.parse("x: &x [1, 2]\ny: *x\n", "f.yaml")
    source.remove([source.find(("y", 0))[0]])
    assert source.root.plain() == {"x": [1, 2], "y": [2]}
    assert source.damaged("y")
    assert source.damaged("y", 0, "deeper")
    assert not source.damaged("x")


def test_merging_a_scalar_and_odd_keys_are_problems() -> None:
    source = yaml_source.parse("x: {<<: 3}\n? [a, b]\n: 1\nz: !!python/object:os.system 1\n", "f")
    texts = [text for _, text in source.problems]
    assert texts == [
        "<< merges mappings, found 3; allowed: *anchor of a mapping",
        "a key is a list or mapping; allowed: a word",
        "tag tag:yaml.org,2002:python/object:os.system is not used in configs; leave it out",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml:1:1: the file is empty"),
        ("# only a comment\n", "f.yaml:1:1: the file is empty"),
        ("- a\n- b\n", "f.yaml:1:1: found a list of 2 values; allowed: a mapping"),
        ("just text", "f.yaml:1:1: found 'just text'; allowed: a mapping"),
        ("null", "f.yaml:1:1: found nothing; allowed: a mapping"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: a second document starts here"),
        ("a: [1, 2\nb: 3\n", "f.yaml:2:2: YAML syntax: expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", "f.yaml:2:1: YAML syntax: found character '\\t'"),
        ("a: 'open\n", "f.yaml:2:1: YAML syntax: found unexpected end of stream"),
        ("a: *nowhere\n", "f.yaml:1:4: YAML syntax: found undefined alias"),
        ("a: 1\nb: \x00", "f.yaml:2:4: not YAML text"),
        ("a: &a [*a]\n", "f.yaml:1:4: an alias contains itself"),
        ("a: &a {<<: *a}\n", "f.yaml:1:4: an alias contains itself"),
        ("a: " + "[" * 5000, "levels"),
        ("a: " + "[" * 40 + "]" * 40, "f.yaml:1:35: values are nested deeper than 32 levels"),
    ],
)
def test_what_is_no_config_says_where(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        yaml_source.parse(text, "f.yaml")
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_alias_bomb_ends_quickly() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    start = time.monotonic()
    with pytest.raises(ConfigError, match="more than 100000 values once aliases are expanded"):
        yaml_source.parse("\n".join(rows), "bomb.yaml")
    assert time.monotonic() - start < 10


def test_number_too_long_for_python_is_a_problem() -> None:
    source = yaml_source.parse("a: " + "9" * 5000, "f.yaml")
    assert [text for _, text in source.problems] == ["a number of 5000 digits is too long"]


def test_files_that_cannot_be_configs(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            yaml_source.read(path)
        return str(caught.value)

    assert message(tmp_path / "none.yaml") == f"{tmp_path}/none.yaml: no such file"
    assert "is a folder" in message(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\x7fELF\x02\x01\xff\xfe")
    assert "is not UTF-8 text (byte 6" in message(binary)
    big = tmp_path / "big.yaml"
    big.write_bytes(b"a" * (yaml_source.MAX_FILE_BYTES + 1))
    assert "a config has at most 1048576" in message(big)
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    assert "is a device or pipe" in message(fifo)


def test_byte_order_mark_and_crlf_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: [2]\r\n")
    assert yaml_source.read(path).root.plain() == {"a": 1, "b": [2]}

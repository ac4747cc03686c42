"""Configs that were once found to crash the reader: every one is an error with its place."""

import time

import pytest

from mokbench.config import parse
from mokbench.errors import ConfigError

HEAD = "ranks: 2\nsystems: [mok]\ntokens_per_rank: 4\n"
MODEL = "model: {hidden: 64, intermediate: 64, experts: 8, top_k: 2}\n"


@pytest.mark.parametrize(
    "text, message",
    [
        (HEAD + 'model: "a\\ud800"\n', "surrogate"),
        (HEAD + MODEL + 'routing: {trace: "a\\ud800.npz"}\n', "surrogate"),
        (HEAD + f"model: ./{'x' * 5000}\n", "File name too long"),
        (HEAD + "model: ~no_such_user/config.json\n", "home directory"),
        (HEAD + MODEL + f"routing: {{trace: {'y' * 5000}.npz}}\n", "File name too long"),
        (HEAD + MODEL + "routing: {trace: ~no_such_user/x.npz}\n", "home directory"),
        (HEAD + MODEL + "routing: {preset: [typical]}\n", "unknown preset"),
        (HEAD + MODEL + "routing: {preset: {a: 1}}\n", "unknown preset"),
        (HEAD + MODEL + f"routing: {{empty_experts: 1{'0' * 400}}}\n", "empty_experts"),
    ],
)
def test_hostile_values_are_errors_with_their_place(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert all(problem.startswith("config.yaml:") for problem in caught.value.problems)


def test_many_unknown_keys_are_told_in_seconds():
    text = HEAD + MODEL + "".join(f"key{i}: 1\n" for i in range(2000))
    start = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert len(caught.value.problems) == 2000
    assert time.perf_counter() - start < 20

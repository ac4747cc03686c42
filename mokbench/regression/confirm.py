"""Confirmation of suspects by running base and candidate in turn: A B A B A B.

A shift against a history may be the machine's: new neighbours, a warmer room. Base and candidate
measured minutes apart on the same machine share those, so only what repeats there is a regression.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mokbench.durable import as_results_error
from mokbench.errors import ConfigError, MokbenchError
from mokbench.regression.agreement import refuse_others
from mokbench.regression.history import History
from mokbench.regression.judge import Judged, as_failed, judge_sides, worst_first
from mokbench.regression.launch import Launch, one_kind
from mokbench.regression.levels import was_good
from mokbench.regression.verdict import Call, Limits, Verdict
from mokbench.results import RunFolder
from mokbench.run_meta import RunMeta

ROUNDS = 3
# The suspects are few and the data are new, so each may be tested at this level; with the first
# stage's 1 % the false alarms of both together are far below that.
CONFIRM_ALPHA = 0.05
# As many cells as a command line takes with ids of the greatest length.
MOST_CELLS = 50
_WHERE = "import mokbench.record as r; print(r.__file__); print(r.METHOD_VERSION, r.RECORD_VERSION)"


@dataclass(frozen=True)
class Confirmation:
    """How to measure again: both interpreters, the config to run, where runs go, how often.

    ``baseline_commit``: what the base is. Only one that the history has as good clears a suspect.
    """

    baseline_python: Path
    config: Path
    out: Path
    rounds: int = ROUNDS
    say: Callable[[str], None] = lambda text: None
    baseline_commit: str | None = None


def suspects(judged: Sequence[Judged], limits: Limits) -> list[Judged]:
    """Series that gate and are slower by more than the floor, each at its own ``alpha``.

    Confirmation takes away none but those it cleared: that a suspect did not repeat against a base
    that may be as slow, or in noise, does not make its launches a base.
    """
    return [
        one
        for one in judged
        if one.gates
        and not one.cleared
        and one.call.verdict in (Verdict.SLOWER, Verdict.AMBIGUOUS, Verdict.FAILED)
        and one.call.ratio is not None
        and one.call.ratio >= 1 + limits.floor
        and one.call.p is not None
        and one.call.p <= limits.alpha
    ]


def confirm(
    judged: Sequence[Judged],
    plan: Confirmation,
    limits: Limits,
    metrics: Sequence[str],
    history: History,
    candidates: Sequence[Launch],
) -> list[Judged]:
    """Replace the calls of the suspects that are measured again by what the runs in turn say.

    Raises MokbenchError for a run that fails: a suspect that could not be measured again must not
    turn green. ResultsError for runs on another machine than the candidates', or of other cells.
    """
    found = suspects(judged, limits)
    if not found:
        return list(judged)
    ids = list(dict.fromkeys(one.series[0] for one in found))[:MOST_CELLS]
    base, candidate = measure(plan, ids)
    one_kind([candidates[0], *base, *candidate])
    for known in candidates:
        refuse_others([*base, *candidate], known, ids)
    again = {one.series: one.call for one in judge_sides(base, candidate, metrics, _sharp(limits))}
    left = {one.series for one in found}
    chosen = {series for series in left if series[0] in ids}

    def settled(one: Judged) -> Judged:
        if one.series in chosen:
            # That it ran this time does not undo that it failed.
            return as_failed(_settled(one, again.get(one.series), plan, history))
        return _unmeasured(one) if one.series in left else one

    return worst_first([settled(one) for one in judged])


def measure(plan: Confirmation, ids: Sequence[str]) -> tuple[list[Launch], list[Launch]]:
    """Run base and candidate ``rounds`` times in turn; returns their launches."""
    pythons = _pythons(plan)
    launches: dict[str, list[Launch]] = {"base": [], "candidate": []}
    for number in range(1, plan.rounds + 1):
        # Who goes first changes, so that a drift inside a round favours neither.
        order = list(pythons) if number % 2 else list(reversed(pythons))
        for side in order:
            plan.say(f"confirming {len(ids)} cells: round {number} of {plan.rounds}, {side}")
            out = plan.out / f"{side}-{number}"
            _run(pythons[side], side, plan.config, ids, out)
            launches[side].append(Launch.of(RunFolder.open(out)))
    return launches["base"], launches["candidate"]


def refuse_unusable(plan: Confirmation) -> None:
    """Raise ConfigError for an interpreter that cannot be the base, before there is a suspect."""
    _check(_pythons(plan))


def interpreter(given: str) -> Path:
    """Path of a python as a shell takes it: without a slash it is looked up in PATH."""
    return Path(given).absolute() if os.sep in given else Path(given)


def config_of(run: RunFolder) -> Path:
    """Config of a run as a file that reads as it did: beside the original if that is unchanged.

    Paths inside a config (traces, model files) are relative to its folder; ConfigError when the
    original is gone or differs and the copy would have to guess them.
    """
    meta: RunMeta = run.meta
    original = run.path / str(meta.config.get("from_run") or "")
    if _reads_as(original, meta.config_text):
        return original.resolve()
    if "trace" in meta.config_text or ".json" in meta.config_text:
        raise ConfigError(
            [
                f"{run.path}: its config names other files and is no longer at "
                f"{os.path.normpath(original)}; give --config"
            ]
        )
    with (
        as_results_error(run.path, "copying its config", "give --config"),
        tempfile.NamedTemporaryFile(
            "w", suffix=".yaml", prefix="mokbench-", delete=False, encoding="utf-8"
        ) as file,
    ):
        file.write(meta.config_text)
    return Path(file.name)


def _reads_as(path: Path, text: str) -> bool:
    """Whether a file is there, can be read and holds ``text``, as reading a config takes it."""
    try:
        return path.is_file() and path.read_bytes().decode("utf-8-sig") == text
    except (OSError, UnicodeDecodeError):
        return False


def _pythons(plan: Confirmation) -> dict[str, Path]:
    return {"base": plan.baseline_python, "candidate": Path(sys.executable)}


def _sharp(limits: Limits) -> Limits:
    return replace(limits, alpha=CONFIRM_ALPHA, least_base=2, least_candidate=2)


def _settled(one: Judged, again: Call | None, plan: Confirmation, history: History) -> Judged:
    before = one.call
    if again is None or again.verdict is Verdict.INSUFFICIENT:
        why = f"{before.why}; could not be confirmed: " + (again.why if again else "no value of it")
        return replace(one, call=replace(before, verdict=Verdict.FAILED, why=why), again=True)
    told = f"{before.why}; in {plan.rounds} interleaved rounds {again.why}"
    if again.verdict in (Verdict.SLOWER, Verdict.CLOCK):
        return replace(one, call=replace(before, verdict=again.verdict, why=told), again=True)
    is_same = again.verdict is Verdict.SAME and not one.failed
    cleared = is_same and was_good(
        plan.baseline_commit, one.series, history.launches, history.levels, one.mark
    )
    how = f"cleared against {plan.baseline_commit}" if cleared else "not confirmed, no base yet"
    call = replace(before, verdict=Verdict.AMBIGUOUS, why=f"{how}: {told}")
    return replace(one, call=call, again=True, cleared=cleared)


def _unmeasured(one: Judged) -> Judged:
    """A suspect beyond ``MOST_CELLS`` keeps its first call and stays out of the base."""
    why = f"{one.call.why}; not measured again: --confirm takes the worst {MOST_CELLS} cells"
    return replace(one, call=replace(one.call, why=why))


def _check(pythons: dict[str, Path]) -> None:
    """Both interpreters must have a mokbench, not the same one, and measure the same thing."""
    told = {side: _ask(python, side) for side, python in pythons.items()}
    if told["base"][0] == told["candidate"][0]:
        raise ConfigError(
            [
                f"--baseline-python {pythons['base']}: imports the candidate's own mokbench "
                f"({told['base'][0]}); install the base in an environment of its own"
            ]
        )
    if not _reads_all(told["candidate"][1], told["base"][1]):
        raise ConfigError(
            [
                f"--baseline-python {pythons['base']}: its mokbench has method and record version "
                f"{told['base'][1]}, the candidate's {told['candidate'][1]}: their figures do not "
                "compare"
            ]
        )


def _reads_all(own: str, base: str) -> bool:
    """Whether this mokbench reads what the base writes, and it means the same.

    A field that was added since is no other figure: with it a nightly gate, whose base is of the
    night before, would stand still for good.
    """
    method, newest = own.split()
    readable = range(1, int(newest) + 1)
    return base in [f"{method} {older}" for older in readable]


def _ask(python: Path, side: str) -> tuple[str, str]:
    command = [str(python), "-P", "-c", _WHERE]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=_environment(side),
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError([f"{python}: cannot be run: {error}"]) from error
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) < 2:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError([f"{python}: has no mokbench that can be imported: {last}"])
    return lines[-2], lines[-1]


def _run(python: Path, side: str, config: Path, ids: Sequence[str], out: Path) -> None:
    only = [part for cell in ids for part in ("--only", f"id={cell}")]
    command = [str(python), "-P", "-m", "mokbench", "run", str(config), "--out", str(out)]
    done = subprocess.run(
        [*command, "--no-charts", "--quiet", *only],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(side),
    )
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise MokbenchError(f"the confirming run of the {side} failed ({done.returncode}): {last}")


def _environment(side: str) -> dict[str, str]:
    """The base must not find the candidate's checkout on its path, nor call itself its commit."""
    environment = dict(os.environ)
    if side == "base":
        for name in ("PYTHONPATH", "MOKBENCH_COMMIT"):
            environment.pop(name, None)
    return environment

"""Which folder of a history is a machine's: the one that is called so, and no other.

A history that is not found passes for a new one, whose verdict is INSUFFICIENT, which passes too.
"""

import re
import stat
from pathlib import Path

from pydantic import Field

from mokbench.durable import as_results_error, is_kind, replace_file
from mokbench.errors import ResultsError
from mokbench.figures import first_problem
from mokbench.machine import Machine
from mokbench.regression.history_checks import is_there, refuse_no_folder
from mokbench.regression.history_lines import machines
from mokbench.run_checks import refuse_stale_key

LAUNCHES, LEVELS, MACHINE = "launches.jsonl", "levels.jsonl", "machine.json"


class Kept(Machine):
    """What machine.json holds: the machine, and how many levels were accepted, lest they be lost.

    It is written after the level's line, so there may be one more than it says.
    """

    levels: int = Field(0, ge=0)


def folder_of(root: Path, machine: Machine) -> Path:
    """Folder of a machine in a history, whether it is there or not: its model, and its key.

    Raises ResultsError where ``root`` is itself a machine's folder, or has a history of ``machine``
    in a folder of another name.
    """
    refuse_no_folder(root)
    if is_there(root / LAUNCHES):
        raise ResultsError(f"{root}: is one machine's folder; give the folder that it is in")
    own = root / _name(machine)
    for other in _inside(root):
        if other == own or not _is_history(other) or _same(other, own):
            continue
        told, keys = _told(other), machines(other / LAUNCHES)
        if machine.key in keys or (told is not None and told.key == machine.key):
            refuse_misnamed(other, keys)
            raise _misnamed(other, machine.key, own.name)
    if not is_there(own):
        _refuse_deeper(root)
    return own


def machine_folders(root: Path) -> list[Path]:
    """Machines' folders in a history, or the one that ``root`` itself is. ResultsError for none."""
    refuse_no_folder(root)
    found = [path for path in (root, *_inside(root)) if _is_history(path)]
    if not found:
        raise ResultsError(
            f"{root}: no history (no {LAUNCHES} in it or in a folder of it); "
            "mokbench check RUNS --history DIR --record starts one"
        )
    return found


def refuse_misnamed(folder: Path, keys: set[str]) -> None:
    """Raise ResultsError where ``keys``, of the machines of a folder's launches, are not its own.

    That is the one key that its name and machine.json say.
    """
    if len(keys) > 1:
        raise ResultsError(
            f"{folder / LAUNCHES}: holds launches of {len(keys)} machines "
            f"({', '.join(sorted(keys))}); a folder is for one: move the others' lines out"
        )
    told, name = _told(folder), folder.resolve().name
    for key in keys:
        if not name.endswith(f"-{key}"):
            raise _misnamed(folder, key, _name(told) if told else f"...-{key}")
        if told is None:
            continue
        refuse_stale_key(folder / MACHINE, told)
        if told.key != key:
            raise ResultsError(
                f"{folder / MACHINE}: describes the machine with key {told.key}, the launches "
                f"beside it are of {key}: restore the folder from version control"
            )
        if name != _name(told):
            raise _misnamed(folder, key, _name(told))


def levels_told(folder: Path) -> int:
    """How many levels machine.json says were accepted."""
    told = _told(folder)
    return 0 if told is None else told.levels


def tell(folder: Path, machine: Machine | None, levels: int) -> None:
    """Write machine.json, of ``machine`` where it is not there yet, unless it says so already.

    Others may not write the folder meanwhile. Raises ResultsError, OSError.
    """
    told = _told(folder)
    if told is not None and told.levels >= levels:
        return
    kept = told or machine
    if kept is None:
        raise ResultsError(f"{folder / MACHINE}: is not there; record the runs first")
    fields = kept.model_dump(exclude={"gpu_uuids", "levels"})
    text = Kept(**fields, levels=levels).model_dump_json(indent=1, exclude={"gpu_uuids"})
    replace_file(folder / MACHINE, text.encode() + b"\n")


def machine_name(folder: Path) -> str:
    """What people call the machine of a folder: from machine.json, else the folder's name."""
    told = _told(folder)
    if told is None:
        return folder.name
    what = f"{told.gpus} x {told.gpu}, driver {told.driver}" if told.gpus else told.cpu
    return f"{what}, torch {told.torch}, key {told.key}"


def _name(machine: Machine) -> str:
    """Its model, so that people find it, and the key that tells it apart."""
    what = f"{machine.gpu} x{machine.gpus}" if machine.gpus else machine.cpu or "machine"
    slug = re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")[:40].strip("-")
    return f"{slug or 'machine'}-{machine.key}"


def _misnamed(folder: Path, key: str, name: str) -> ResultsError:
    return ResultsError(
        f"{folder}: holds launches of machine {key}, which its name does not say: has it been "
        f"renamed, or copied over another? call it {name}, or move it out of the history"
    )


def _inside(root: Path) -> list[Path]:
    """What is in ``root``, in order; nothing where it is not there."""
    with as_results_error(root, "reading", "make it readable"):
        return sorted(root.iterdir()) if root.is_dir() else []


def _is_history(folder: Path) -> bool:
    path = folder / LAUNCHES
    with as_results_error(folder, "reading", "make it readable"):
        return (
            is_kind(stat.S_ISREG, path)
            or path.is_symlink()
            or is_kind(stat.S_ISREG, folder / MACHINE)
        )


def _refuse_deeper(root: Path) -> None:
    """Raise ResultsError where histories are one folder further down than they are looked for."""
    for folder in _inside(root):
        with as_results_error(folder, "reading", "make it readable"):
            deeper = _inside(folder) if is_kind(stat.S_ISDIR, folder) else []
        if any(map(_is_history, deeper)):
            raise ResultsError(
                f"{root}: has histories one folder further down, in {folder}: give that as "
                "--history, or move it out of here"
            )


def _same(folder: Path, own: Path) -> bool:
    """Whether a folder is a machine's own by another name, a link."""
    with as_results_error(folder, "reading", "make it readable"):
        return is_kind(stat.S_ISDIR, own) and folder.samefile(own)


def _told(folder: Path) -> Kept | None:
    """What machine.json says; null for none. ResultsError for one that does not read."""
    path = folder / MACHINE
    if not is_there(path):
        return None
    with as_results_error(path, "reading", "make it readable"):
        if not is_kind(stat.S_ISREG, path):
            raise ResultsError(f"{path}: is no file; restore it from version control")
        content = path.read_bytes()
    try:
        return Kept.model_validate_json(content)
    except ValueError as error:
        raise ResultsError(
            f"{path}: does not describe a machine: {first_problem(error)}; restore it from version "
            "control"
        ) from error

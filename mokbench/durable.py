"""Files that survive a crash, a full disk and a second writer: whole new content or none."""

import contextlib
import errno
import fcntl
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from mokbench.errors import ResultsError

_LOCK_WAIT_S, _LOCK_PAUSE_S = 0.08, 0.02
# Some cluster file systems (Lustre without -o flock, old NFS) have no locks at all.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def append_line(path: Path, text: str) -> None:
    """Append one line, or several joined by newlines, and sync: all or, on an error, none.

    A full disk (ENOSPC), a quota or RLIMIT_FSIZE (EFBIG) can accept a part: the file is then cut
    back to what it held before. Raises OSError.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        whole = os.fstat(descriptor).st_size
        is_whole = False
        try:
            _write_all(descriptor, text.encode() + b"\n")
            is_whole = True
            os.fsync(descriptor)
        except BaseException as error:
            # Ctrl-C during the sync takes no line away that is there and that others may have read.
            if not is_whole or isinstance(error, OSError):
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, whole)
            raise
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write ``path`` as a whole: a reader sees the old content or the new. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(path.parent)


def whole_lines(path: Path) -> tuple[list[bytes], int]:
    """Lines of ``path`` that were ended, and the bytes of the torn one behind them (0: none)."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    end = content.rfind(b"\n") + 1
    return content[:end].splitlines(), len(content) - end


def cut_torn_line(path: Path) -> int:
    """Remove a last line that a crash left without its end; returns the bytes removed.

    One that lacks nothing but its newline is kept, and gets it. Raises OSError.
    """
    torn = whole_lines(path)[1]
    if not torn:
        return 0
    if is_whole_object(path.read_bytes()[-torn:]):
        append_line(path, "")
        return 0
    os.truncate(path, path.stat().st_size - torn)
    return torn


def is_whole_object(line: bytes) -> bool:
    """Whether a line without its newline is all there: no part of a JSON object is one."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class Lock:
    """The right to write one folder, held through a lock file until release or process death."""

    def __init__(self, folder: Path, wait_s: float = _LOCK_WAIT_S) -> None:
        """Take the lock. Raises ResultsError when another one holds it for longer than wait_s."""
        path = folder / ".lock"
        if path.is_dir():
            raise ResultsError(f"{path}: is a folder, and must be a file to lock: remove it")
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock_soon(self._descriptor, wait_s)
        except OSError as error:
            holder = os.pread(self._descriptor, 100, 0).decode(errors="replace").strip()
            if error.errno in _NO_LOCKS:
                warnings.warn(
                    f"{folder}: this file system has no locks; do not write one run folder "
                    "from two processes",
                    stacklevel=3,
                )
                return
            os.close(self._descriptor)
            raise ResultsError(
                f"{folder}: another mokbench process ({holder or 'pid unknown'}) is writing "
                "here; wait for it to end, or use another folder"
            ) from error
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"pid {os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others write; calling it again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _lock_soon(descriptor: int, wait_s: float) -> None:
    """Take the lock; one that only looks whether it is held has it for a moment."""
    for left in reversed(range(1 + round(wait_s / _LOCK_PAUSE_S))):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if left == 0:
                raise
            time.sleep(_LOCK_PAUSE_S)


def is_locked(folder: Path) -> bool:
    """Whether another process holds the folder's lock now; True where nobody can tell."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_kind(kind: Callable[[int], bool], path: Path) -> bool:
    """As Path.is_dir and is_file, which from Python 3.14 on say no to what may not be read.

    ``kind`` is ``stat.S_ISDIR`` or a like. Raises OSError.
    """
    try:
        return kind(path.stat().st_mode)
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise


@contextlib.contextmanager
def as_results_error(path: Path, doing: str, advice: str) -> Iterator[None]:
    """Turn an OSError inside into a ResultsError that names the file, the cause and the way out."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        raise ResultsError(f"{path}: {doing} failed: {cause}; {advice}") from error


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folder(folder: Path) -> None:
    # A rename is durable only once its folder is; file systems that cannot sync one are let be.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

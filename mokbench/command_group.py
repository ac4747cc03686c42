"""The command line's outermost layer: output that cannot be written, errors nobody expected."""

import contextlib
import errno
import io
import sys
import traceback
from typing import Any, NoReturn, TextIO

import click

from mokbench.say import say

EXIT_NOT_WRITTEN = 2
# What sysexits.h has for a fault inside; Python's own 1 is the code of a regression.
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
# A full disk, a quota, a limit on a file's size, a terminal or mount that went away, a reader who
# left before bad usage was said.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class CommandGroup(click.Group):
    """Commands whose output may be full or closed: one line on it, and no traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the command line; ``--help`` and ``--version`` are answered here."""
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:
            _end(0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; that a reader left (``| head``) is no error."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _end(0)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and see its output written.

        Exits with ``EXIT_NOT_WRITTEN`` where a command that went well could not write it, with
        the command's own code where a reader left, and with ``EXIT_BUG`` for what nobody expected.
        """
        _write_whole()
        try:
            return super().main(*args, **kwargs)
        except SystemExit as end:
            # Here what is left in a buffer can still be reported; at the interpreter's end not.
            if (error := _flush(sys.stdout) or _flush(sys.stderr)) is not None:
                _give_up(error, end.code)
            raise
        except OSError as error:
            # What names a file is about that file, and a fault of ours that nobody caught.
            if error.errno not in _NOT_WRITTEN or error.filename is not None:
                _say_bug()
            _give_up(error, EXIT_NOT_WRITTEN)
        except Exception:
            _say_bug()


def _write_whole() -> None:
    """Give unbuffered streams (PYTHONUNBUFFERED, -u) what writes the rest of a write.

    Python drops without a word what a raw file did not take, as on a disk that is nearly full.
    """
    sys.stdout, sys.stderr = _buffered(sys.stdout), _buffered(sys.stderr)


def _buffered(out: TextIO) -> TextIO:
    if isinstance(out, io.TextIOWrapper) and isinstance(out.buffer, io.RawIOBase):
        raw = io.BufferedWriter(out.buffer)
        return io.TextIOWrapper(raw, out.encoding, out.errors, line_buffering=True)
    return out


def _say_bug() -> NoReturn:
    with contextlib.suppress(OSError):
        traceback.print_exc()
    say("this is a bug in mokbench, and says nothing of what was measured")
    _end(EXIT_BUG)


def _give_up(error: OSError, code: int | str | None) -> NoReturn:
    if not isinstance(error, BrokenPipeError):
        why = error.strerror or str(error)
        say(f"writing the output failed: {why}; what was printed is not whole")
        code = code or EXIT_NOT_WRITTEN
    _end(code)


def _end(code: int | str | None) -> NoReturn:
    """Exit with this code, and not with the interpreter's 120 for streams that it cannot flush."""
    _flush(sys.stdout)
    _flush(sys.stderr)
    sys.exit(code)


def _flush(stream: TextIO | None) -> OSError | None:
    """Write what a stream still holds; the error where that fails, and the stream is closed.

    Closed, it is not flushed, and complained about, once more at the interpreter's end.
    """
    if stream is None or stream.closed:
        return None
    try:
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            stream.close()
        return error
    return None

"""The command line's outermost layer: output that cannot be written, errors nobody expected."""

import contextlib
import errno
import io
import sys
import traceback
from typing import Any, NoReturn

import click

EXIT_NOT_WRITTEN = 2
# What sysexits.h has for a fault inside; Python's own 1 is the code of a regression.
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
# A full disk, a quota, a limit on a file's size, a terminal or mount that went away.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class CommandGroup(click.Group):
    """Commands whose standard output may be full or closed: one line on it, and no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; that a reader left (``| head``) is no error."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            sys.exit(0)
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
            if (error := _flush()) is not None:
                _give_up(error, end.code)
            raise
        except OSError as error:
            # What names a file is about that file, and a fault of ours that nobody caught.
            if error.errno not in _NO_ROOM or error.filename is not None:
                _say_bug()
            _give_up(error, 0)
        except Exception:
            _say_bug()


def _write_whole() -> None:
    """Give an unbuffered standard output (PYTHONUNBUFFERED, -u) what writes the rest of a write.

    Python drops without a word what a raw file did not take, as on a disk that is nearly full.
    """
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and isinstance(out.buffer, io.RawIOBase):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(out.buffer), out.encoding, out.errors, line_buffering=True
        )


def _say_bug() -> NoReturn:
    with contextlib.suppress(OSError):
        traceback.print_exc()
        click.echo("this is a bug in mokbench, and says nothing of what was measured", err=True)
    if _flush() is not None:
        _close()
    sys.exit(EXIT_BUG)


def _flush() -> OSError | None:
    """Write what standard output still holds; the error where that fails."""
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError as error:
        return error
    return None


def _close() -> None:
    """Closed, it is not flushed, and complained about, once more at the interpreter's end."""
    with contextlib.suppress(OSError):
        sys.stdout.close()


def _give_up(error: OSError, code: int | str | None) -> NoReturn:
    _close()
    if isinstance(error, BrokenPipeError):
        sys.exit(code)
    with contextlib.suppress(OSError):
        why = error.strerror or str(error)
        click.echo(f"writing the output failed: {why}; what was printed is not whole", err=True)
    sys.exit(code or EXIT_NOT_WRITTEN)

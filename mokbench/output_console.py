"""Standard output for what rich draws."""

import errno
import os
from typing import NoReturn

from rich.console import Console


class OutputConsole(Console):
    """A reader who left (``| head``) is for the command: rich would exit with a regression's 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Let the error through."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

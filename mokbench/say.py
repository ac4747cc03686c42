"""What is meant for the user and is no data goes to standard error, which may be closed or full."""

import contextlib

import click

from mokbench.shown_text import visible


def say(text: str) -> None:
    """Write a line to standard error.

    That it cannot be read must not end a command, nor give it another exit code than it earned.
    """
    # ValueError: the stream is closed.
    with contextlib.suppress(OSError, ValueError):
        click.echo(visible(text), err=True)

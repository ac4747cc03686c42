"""A new temporary folder whose path is short enough for the sockets that will lie in it."""

import tempfile
from pathlib import Path

# A socket's path has at most 107 bytes on Linux and 103 on macOS.
_MAX_SOCKET_BYTES = 103


def private_folder(prefix: str, longest_socket: str) -> Path:
    """Under TMPDIR, or under /tmp where ``longest_socket`` in it would have too long a path."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(str(folder / longest_socket).encode()) > _MAX_SOCKET_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    return folder

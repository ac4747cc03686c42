"""One rank's process: bound to its launcher's life first, then to its work (mokbench/jobs.py).

Started as ``python -P -m mokbench.worker`` with one JSON line on standard input, which then stays
open as a lifeline. When the launcher dies, however it dies, the kernel kills the rank at once; a
thread ends it where no kernel offers that. What is left to remove is for mokbench/keeper.py.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import traceback

# linux/prctl.h
_PR_SET_PDEATHSIG = 1


def _die_with_launcher() -> None:
    """SIGKILL when the launcher dies: a rank may be stopped, or wait in C and hold the interpreter.

    torch's rendezvous of symmetric memory does that while it waits for a peer, and the peer is gone
    by then. The kernel minds the thread that started this process: for launchers, the main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _end_with_lifeline() -> None:
    """For a launcher that died before the kernel was told, and for other systems."""
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Entry of one rank."""
    # Ctrl-C reaches the launcher, which decides; a worker must not die half-way on its own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_launcher()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the launcher died before it had told us anything
    threading.Thread(target=_end_with_lifeline, daemon=True).start()
    code = 0
    try:
        # Here, since torch takes seconds to import: the launcher may die meanwhile.
        from mokbench.jobs import serve

        serve(json.loads(line))
    except BaseException:
        traceback.print_exc()
        code = 1
    # gloo's and torch's exit handlers have nothing left to do and can hang on a lost peer.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

"""Becomes another program that dies with whoever started it: `python leash.py PARENT_PID program arguments...`.

Runs in the new process before the program does, so that nothing has to happen between fork and exec in a parent that
has threads. The kernel sends the signal when the *thread* that started this process ends: start from the main thread.
Elsewhere than on Linux it only becomes the program; what a killed parent leaves is then found by the next start.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before the signal was asked for
            sys.exit(1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and ignoring survives exec
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()

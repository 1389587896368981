"""`python -m dreamc`, and the command `dreamc` of the package: the program itself."""

import signal
import sys

from . import _dreamc


def main() -> int:
    """Runs the command line; the exit codes are those of `dreamc --help`."""
    # The program has its own way with Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _dreamc.run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

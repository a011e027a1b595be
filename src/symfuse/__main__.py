"""`symfuse` and `python -m symfuse`: the command line, interruptible from its first import on."""

import sys

from symfuse.signals import signals_as_exceptions


def main() -> None:
    """Import the command line, and run it."""
    try:
        with signals_as_exceptions():
            from symfuse.cli import main as run

            run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""`python -m raydist`: the command line, and what `torchrun -m raydist job.yaml` starts in every process."""

from __future__ import annotations

import sys

from raydist.cli import main


def with_command(arguments: list[str]) -> list[str]:
    """`arguments`, with `train` put first when they begin with a job file instead of a command."""
    if arguments and arguments[0].lower().endswith((".yaml", ".yml")):
        return ["train", *arguments]
    return arguments


if __name__ == "__main__":
    sys.argv[1:] = with_command(sys.argv[1:])
    sys.exit(main())

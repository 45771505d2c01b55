"""The errors a user can meet, and the exit code each one becomes."""

from __future__ import annotations


class RaydistError(Exception):
    """Base of every error that raydist raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(RaydistError):
    """The job file or the command is wrong: nothing was started."""

    exit_code = 2


class DataError(RaydistError):
    """The data cannot be used as asked: names the file, the column and, where it is known, the row."""


class TrainError(RaydistError):
    """Training failed: names the step, and the rank where it matters."""


class CheckpointError(RaydistError):
    """A checkpoint is damaged, absent, or does not belong to this job."""


class Interrupted(RaydistError):
    """The run was asked to stop and did, with a checkpoint."""

    exit_code = 3


class Stopped(RaydistError):
    """The command was stopped by a signal; the words say what that means, `exit_code` is 128 + the signal."""

    def __init__(self, words: str, exit_code: int = 130) -> None:
        super().__init__(words)
        self.exit_code = exit_code


class ScriptFailed(RaydistError):
    """A script of `raydist run` failed: `exit_code` is the first failing rank's."""

    def __init__(self, words: str, exit_code: int) -> None:
        super().__init__(words)
        self.exit_code = exit_code

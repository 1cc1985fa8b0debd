"""Errors the command line shows as one line on stderr."""


class CliError(Exception):
    """Something the user can act on; `exit_code` becomes the exit status of the process."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code

"""Lists of numbers on the command line."""

from .output import CliError


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """Positive numbers with commas between them; CliError (exit 2) naming `flag`."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise CliError(f"{flag} {text!r} is not a list like 1,2,4,8", exit_code=2)
    return tuple(int(part) for part in parts)

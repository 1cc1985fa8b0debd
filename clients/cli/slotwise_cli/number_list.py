"""Lists of numbers on the command line."""

from .output import CliError


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """Positive numbers with commas between them; CliError (exit 2) naming `flag`."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise CliError(f"{flag} {text!r} is not a list like 1,2,4,8", exit_code=2)
    return tuple(int(part) for part in parts)


def decimals(flag: str, text: str) -> tuple[float, ...]:
    """The same with fractions, as 0.5,1,2."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < one < float("inf") for one in found):
        raise CliError(f"{flag} {text!r} is not a list like 0.5,1,2", exit_code=2)
    return found

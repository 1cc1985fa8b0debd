"""What `slotwise doctor` finds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `ok` False is a fault; None is a remark. `advice`: what to do."""

    what: str
    ok: bool | None
    state: str
    advice: str = ""


def gib(size: int) -> str:
    """Bytes in GiB, for people."""
    return f"{size / 2**30:.2f} GiB"

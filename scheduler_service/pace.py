"""How many decode steps go into one command."""

from __future__ import annotations


class StepPace:
    """Estimates the time of a decode step from reported durations; depends on nothing else."""

    def __init__(self, window_ns: int, max_steps: int) -> None:
        """A command should run for about window_ns, and at most max_steps steps."""
        self._window_ns = window_ns
        self._max_steps = max_steps
        # 0: nothing measured yet.
        self.step_ns = 0

    def observe(self, duration_ns: int, num_steps: int) -> None:
        """A decode-only command took duration_ns for num_steps forwards, at least 1."""
        step_ns = max(1, duration_ns // num_steps)
        self.step_ns = step_ns if self.step_ns == 0 else (3 * self.step_ns + step_ns) // 4

    def num_steps(self) -> int:
        """Steps that fill the window; 1 until something was measured."""
        if self.step_ns == 0:
            return 1
        return max(1, min(self._max_steps, self._window_ns // self.step_ns))

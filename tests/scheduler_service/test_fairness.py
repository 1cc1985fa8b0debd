"""Long prompts, short prompts and running streams beside each other (B43), in simulated time."""

from __future__ import annotations

from scheduler_driver import Driver, make_limits, make_request

from scheduler_service.prefix_index import PrefixReuse

STEP_NS = 500_000
PROMPT_TOKEN_NS = 4_000
MAX_STEP = 2048
MAX_MIXED = 512
LONG = 1 << 16
# The longest step in which streams decode.
MIXED_STEP_NS = STEP_NS + MAX_MIXED * PROMPT_TOKEN_NS
STREAMS = tuple(f"stream{index}" for index in range(4))


def make_driver() -> Driver:
    limits = make_limits(
        num_slots=8,
        max_seq_len=1 << 17,
        max_queue_len=10_000,
        max_step_tokens=MAX_STEP,
        max_mixed_step_tokens=MAX_MIXED,
        max_steps_per_command=32,
        run_ahead_window_ns=4 * STEP_NS,
        # Prompts of one token id each would all be found.
        prefix_reuse=PrefixReuse.NONE,
    )
    driver = Driver(limits)
    driver.worker.step_ns = STEP_NS
    driver.worker.prompt_token_ns = PROMPT_TOKEN_NS
    return driver


class Load:
    """Four streams that decode, long prompts one after the other, short ones at a steady rate."""

    def __init__(self) -> None:
        self.d = make_driver()
        self.last_long = ""
        self.told_ns: dict[str, int] = {}
        self.worst_gap_ns = 0
        for name in STREAMS:
            self.d.submit(make_request(name, max_new_tokens=100_000))

    def run(self, seconds: float, shorts_per_s: float, short: int, max_new_tokens: int) -> None:
        num_shorts = 0
        while self.d.now_ns < seconds * 1e9:
            if not self.last_long or self.d.told[self.last_long].end:
                self.last_long = f"long{self.d.now_ns}"
                self.d.submit(make_request(self.last_long, (1,) * LONG, max_new_tokens=1))
            while num_shorts < self.d.now_ns / 1e9 * shorts_per_s:
                num_shorts += 1
                self.d.submit(make_request(f"short{num_shorts}", (2,) * short, max_new_tokens))
            for event in self.d.step():
                self.note(event.request_id)

    def note(self, name: str) -> None:
        if name in STREAMS:
            gap_ns = self.d.now_ns - self.told_ns.get(name, self.d.now_ns)
            self.worst_gap_ns = max(self.worst_gap_ns, gap_ns)
            self.told_ns[name] = self.d.now_ns

    def times_to_first_token_ns(self, kind: str) -> list[int]:
        told = [told for name, told in self.d.told.items() if name.startswith(kind)]
        return [t.request.first_token_ns - t.request.arrival_ns for t in told if t.tokens]


def test_b43_streams_go_on_and_short_prompts_start_beside_long_ones():
    load = Load()
    load.run(seconds=5, shorts_per_s=10, short=200, max_new_tokens=20)
    assert load.worst_gap_ns == MIXED_STEP_NS
    shorts = load.times_to_first_token_ns("short")
    assert len(shorts) >= 49
    # The two commands that are out, and one of its own.
    assert max(shorts) <= 3 * MIXED_STEP_NS
    longs = load.times_to_first_token_ns("long")
    assert len(longs) >= 5
    # At worst half of each step.
    assert max(longs) <= (2 * LONG // MAX_MIXED + 3) * MIXED_STEP_NS
    assert len(load.d.scheduler.queue) == 0


def test_a_long_prompt_ends_under_more_short_ones_than_can_be_served():
    load = Load()
    load.run(seconds=1, shorts_per_s=400, short=1000, max_new_tokens=1)
    assert load.worst_gap_ns == MIXED_STEP_NS
    assert len(load.d.scheduler.queue) > 0
    longs = load.times_to_first_token_ns("long")
    assert 0 < longs[0] <= (2 * LONG // MAX_MIXED + 3) * MIXED_STEP_NS
    order = [name for name in load.d.told if name not in STREAMS]
    admitted = [name for name in load.d.admitted if name not in STREAMS]
    assert admitted == order[: len(admitted)]


def test_prompts_of_one_length_come_one_after_the_other():
    """Sharing evenly would give all of them their first token as late as the last."""
    d = make_driver()
    for index in range(8):
        d.submit(make_request(f"r{index}", (3,) * 2000, max_new_tokens=1))
    d.run()
    first_ns = [d.told[f"r{index}"].request.first_token_ns for index in range(8)]
    steps = [ns // (MAX_STEP * PROMPT_TOKEN_NS) for ns in first_ns]
    assert steps == list(range(1, 9))

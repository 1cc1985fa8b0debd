"""One answered stream of Generate, collected, its shape checked on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from slotwise.v1 import inference_pb2 as pb


@dataclass
class Answer:
    """One of the n choices. tool_calls: [id, name, arguments] by index."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    tool_calls: list[list[str]] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finished: pb.Finished | None = None

    def add_delta(self, delta: pb.Delta) -> None:
        assert self.finished is None, "a delta after Finished"
        if delta.token_ids:
            assert delta.first_token_index == len(self.token_ids), "a gap or an overlap"
        assert len(delta.logprobs) in (0, len(delta.token_ids))
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.reasoning += delta.reasoning_text
        self.logprobs += delta.logprobs
        for call in delta.tool_calls:
            assert (call.id != "") == (call.index == len(self.tool_calls)), "id on the first part"
            if call.id:
                self.tool_calls.append([call.id, call.name, ""])
            self.tool_calls[call.index][2] += call.arguments_json


@dataclass
class Generation:
    """A stream; what it says of the first answer is at hand."""

    accepted: pb.Accepted | None = None
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=lambda: [Answer()])

    def add(self, response: pb.GenerateResponse) -> None:
        event = response.WhichOneof("event")
        assert (self.accepted is None) == (event == "accepted"), "Accepted comes first, once"
        match event:
            case "accepted":
                self.accepted = response.accepted
            case "prompt_logprobs":
                assert not any(answer.token_ids for answer in self.answers), "too late"
                part = response.prompt_logprobs
                assert part.first_token_index == len(self.prompt_logprobs) + 1
                self.prompt_logprobs += part.logprobs
            case "delta":
                self.answer(response.delta.index).add_delta(response.delta)
            case "finished":
                answer = self.answer(response.finished.index)
                assert answer.finished is None, "two Finished"
                answer.finished = response.finished
            case _:
                raise AssertionError(f"an event {event}")

    def answer(self, index: int) -> Answer:
        while index >= len(self.answers):
            self.answers.append(Answer())
        return self.answers[index]

    def check_ended(self) -> None:
        for answer in self.answers:
            assert answer.finished is not None, "no Finished"
            assert answer.finished.usage.completion_tokens == len(answer.token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.answers[0].token_ids

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def logprobs(self) -> list[pb.TokenLogprobs]:
        return self.answers[0].logprobs

    @property
    def finished(self) -> pb.Finished:
        finished = self.answers[0].finished
        assert finished is not None, "not ended"
        return finished

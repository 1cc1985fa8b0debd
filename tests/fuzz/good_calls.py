"""Messages that the front answers well: what the fuzzers begin with."""

from __future__ import annotations

from fuzz.bodies import methods_of
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from scheduler_service.server import InferenceServicer
from slotwise.v1 import inference_pb2 as pb

CHAT = pb.Chat(
    messages=[
        pb.ChatMessage(role="system", content="be kind"),
        pb.ChatMessage(role="user", content="hi \u4f60 <|im_end|>"),
        pb.ChatMessage(
            role="assistant",
            tool_calls=[pb.ToolCall(id="1", name="f", arguments_json='{"a": [1]}')],
        ),
        pb.ChatMessage(role="tool", content="x", tool_call_id="1"),
    ],
    template_kwargs_json='{"message": [1]}',
)
SAMPLING = pb.SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=3,
    min_p=0.1,
    seed=1,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias={3: 1.5, 7: -1.0},
)
GENERATE = [
    pb.GenerateRequest(text="hello", sampling=SAMPLING, max_new_tokens=3, stop=["ab", "c"]),
    pb.GenerateRequest(chat=CHAT, max_new_tokens=2, logprobs=2, n=2, cache_salt="s"),
    pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=range(3, 40)),
        prompt_logprobs=3,
        min_new_tokens=1,
        max_new_tokens=2,
        stop_token_ids=[9, 10],
    ),
    pb.GenerateRequest(request_id="me", text="x", max_new_tokens=1, omit_text=True),
    pb.GenerateRequest(text="y", max_new_tokens=2, attach_window_ms=5),
]
GOOD: dict[str, list[Message]] = {
    "Generate": list(GENERATE),
    "Complete": list(GENERATE),
    "Attach": [
        pb.AttachRequest(request_id="me"),
        pb.AttachRequest(
            request_id="me",
            next_token_index=1,
            other_next_token_indices=[1, 2],
            next_prompt_token_index=3,
        ),
    ],
    "Replay": [pb.ReplayRequest(request_id="me")],
    "Cancel": [pb.CancelRequest(request_id="me")],
    "Tokenize": [pb.TokenizeRequest(text="a \u4f60 <|im_end|>", parse_control_tokens=True)],
    "Detokenize": [pb.DetokenizeRequest(token_ids=[1, 300, 5], keep_control_tokens=True)],
    "RenderChat": [pb.RenderChatRequest(chat=CHAT)],
}
CHECK = health_pb2.HealthCheckRequest(service="slotwise.v1.Inference")


def good_calls() -> dict[str, list[Message]]:
    """By method, of all calls of the public services that are served."""
    served: dict[str, list[Message]] = {}
    services = (pb.DESCRIPTOR, health_pb2.DESCRIPTOR)
    for service in (one for file in services for one in file.services_by_name.values()):
        for path, method in methods_of(service):
            kind = GetMessageClass(method.input_type)
            if kind is health_pb2.HealthCheckRequest:
                served[path] = [CHECK]
            elif service.name == "Health" or method.name in vars(InferenceServicer):
                served[path] = GOOD.get(method.name, [kind()])
    return served

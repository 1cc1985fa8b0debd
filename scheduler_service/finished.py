"""The last event of a request, with its durations."""

from __future__ import annotations

from .request import FinishedEvent, FinishReason, Request


def finished_event(
    request: Request,
    reason: FinishReason,
    num_generated: int,
    now_ns: int,
    matched_token_id: int | None,
    message: str,
    status: str,
) -> FinishedEvent:
    """The event that ends `request` now. A phase that was not reached took 0."""
    admitted_ns = now_ns if request.admitted_ns is None else request.admitted_ns
    first_ns = now_ns if request.first_token_ns is None else request.first_token_ns
    last_ns = first_ns if request.last_token_ns is None else request.last_token_ns
    return FinishedEvent(
        request_id=request.request_id,
        reason=reason,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_generated_tokens=num_generated,
        queue_ns=admitted_ns - request.arrival_ns,
        prefill_ns=first_ns - admitted_ns,
        decode_ns=last_ns - first_ns,
        time_to_first_token_ns=0
        if request.first_token_ns is None
        else first_ns - request.arrival_ns,
        matched_token_id=matched_token_id,
        message=message,
        status=status,
    )

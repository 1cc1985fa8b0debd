#include "received.h"

#include <algorithm>

#include "slotwise/client.h"

namespace slotwise {

namespace {

[[noreturn]] void fail_missing(const v1::Delta& delta, const std::string& what) {
  throw Error(grpc::StatusCode::INTERNAL,
              what + " is missing in the stream of choice " + std::to_string(delta.index()));
}

}  // namespace

void ReceivedText::take(std::string* piece) {
  const size_t num_known = std::min(whole_.size() - at_, piece->size());
  if (whole_.compare(at_, num_known, *piece, 0, num_known) != 0)
    throw Difference("the text has \"" + *piece + "\" where it had \"" +
                     whole_.substr(at_, num_known) + "\"");
  at_ += piece->size();
  piece->erase(0, num_known);
  whole_ += *piece;
}

void Received::rewind(bool to_start) {
  at_ = to_start ? first_index_ : num_tokens();
  text_.rewind(to_start);
  reasoning_.rewind(to_start);
  for (Call& call : calls_) {
    call.is_open = !to_start && call.mark;
    call.arguments.rewind(to_start);
  }
}

bool Received::take(v1::Delta* delta) {
  const bool has_tokens = delta->token_ids_size() > 0;
  take_tokens(delta);
  text_.take(delta->mutable_text());
  reasoning_.take(delta->mutable_reasoning_text());
  take_calls(delta);
  if (has_tokens && at_ == num_tokens()) {
    text_.mark();
    reasoning_.mark();
    for (Call& call : calls_) {
      call.mark = call.is_open;
      call.arguments.mark();
    }
  }
  return delta->token_ids_size() > 0 || !delta->text().empty() ||
         !delta->reasoning_text().empty() || delta->tool_calls_size() > 0;
}

bool Received::finish() {
  const bool is_new = !is_finished_;
  is_finished_ = true;
  return is_new;
}

void Received::take_tokens(v1::Delta* delta) {
  auto& ids = *delta->mutable_token_ids();
  if (ids.empty()) return;
  if (delta->first_token_index() != at_) fail_missing(*delta, "token " + std::to_string(at_));
  const int num_known = std::min<int>(num_tokens() - at_, ids.size());
  for (int i = 0; i < num_known; ++i) {
    const uint32_t known = token_ids_[at_ - first_index_ + i];
    if (ids[i] != known)
      throw Difference("token " + std::to_string(at_ + i) + " is " + std::to_string(ids[i]) +
                       " and was " + std::to_string(known));
  }
  at_ += ids.size();
  ids.erase(ids.begin(), ids.begin() + num_known);
  auto& logprobs = *delta->mutable_logprobs();
  logprobs.DeleteSubrange(0, std::min(num_known, logprobs.size()));
  delta->set_first_token_index(delta->first_token_index() + num_known);
  token_ids_.insert(token_ids_.end(), ids.begin(), ids.end());
}

void Received::take_calls(v1::Delta* delta) {
  auto& parts = *delta->mutable_tool_calls();
  for (auto part = parts.begin(); part != parts.end();) {
    if (part->index() > calls_.size())
      fail_missing(*delta, "tool call " + std::to_string(calls_.size()));
    part = take_call(&*part) ? part + 1 : parts.erase(part);
  }
}

// Cuts a part to what is new; whether anything is. The id that came first stays.
bool Received::take_call(v1::ToolCallDelta* part) {
  const bool is_new = part->index() == calls_.size();
  if (is_new) calls_.push_back({part->name(), {}, true, false});
  Call& call = calls_[part->index()];
  if (!call.is_open) {
    if (part->name() != call.name)
      throw Difference("tool call " + std::to_string(part->index()) + " is \"" + part->name() +
                       "\" and was \"" + call.name + '"');
    part->clear_id();
    part->clear_name();
    call.is_open = true;
  }
  call.arguments.take(part->mutable_arguments_json());
  return is_new || !part->arguments_json().empty();
}

}  // namespace slotwise

#include "reading.h"

#include <algorithm>
#include <random>

namespace slotwise {

namespace {

using grpc::StatusCode;

constexpr Milliseconds kFirstDelay{100};
constexpr Milliseconds kMaxDelay{2'000};
// Within what a server allows by default.
constexpr uint32_t kAttachWindowMs = 30'000;

uint64_t random_bits() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

std::string random_id() {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(random_bits()),
                static_cast<unsigned long long>(random_bits()));
  return text;
}

// With what makes it the same request when it is sent anew, or read on.
v1::GenerateRequest named(v1::GenerateRequest request, bool reconnects) {
  if (!request.has_request_id()) request.set_request_id(random_id());
  if (!request.sampling().has_seed()) request.mutable_sampling()->set_seed(random_bits());
  if (reconnects && !request.has_attach_window_ms()) request.set_attach_window_ms(kAttachWindowMs);
  return request;
}

Milliseconds since(Reading::Clock::time_point begin, Reading::Clock::time_point now) {
  return std::chrono::duration_cast<Milliseconds>(now - begin);
}

}  // namespace

Reading::Reading(Request request, Milliseconds reconnect_timeout)
    : reconnect_timeout_(reconnect_timeout), delay_(kFirstDelay) {
  if (auto* attach = std::get_if<v1::AttachRequest>(&request)) {
    way_ = Way::kAttach;
    id_ = attach->request_id();
    next_prompt_ = attach->next_prompt_token_index();
    received_.try_emplace(0, attach->next_token_index());
    for (int i = 0; i < attach->other_next_token_indices_size(); ++i)
      received_.try_emplace(i + 1, attach->other_next_token_indices(i));
    return;
  }
  auto& generate = std::get<v1::GenerateRequest>(request);
  way_ = Way::kSend;
  has_own_window_ = !generate.has_attach_window_ms();
  request_ = named(std::move(generate), reconnect_timeout > Milliseconds{});
  id_ = request_->request_id();
  num_choices_ = std::max(request_->n(), 1u);
}

Reading::Request Reading::next_call() {
  is_heard_ = false;
  for (auto& [index, received] : received_) received.rewind(way_ != Way::kAttach);
  if (way_ == Way::kSend) {
    ++num_sent_;
    return *request_;
  }
  silence_ = heard_at_ ? Clock::now() - *heard_at_ : Clock::duration::max();
  return attach_request();
}

v1::AttachRequest Reading::attach_request() {
  v1::AttachRequest request;
  request.set_request_id(id_);
  if (way_ == Way::kAttachToAll) return request;
  request.set_next_token_index(received_[0].num_tokens());
  for (uint32_t index = 1; index <= received_.rbegin()->first; ++index)
    request.add_other_next_token_indices(received_[index].num_tokens());
  request.set_next_prompt_token_index(next_prompt_);
  return request;
}

bool Reading::take(v1::GenerateResponse* response) {
  heard_at_ = Clock::now();
  bool is_new = false;
  switch (response->event_case()) {
    case v1::GenerateResponse::kAccepted:
      return take_accepted(response->accepted());
    case v1::GenerateResponse::kDelta:
      is_new = take_delta(response->mutable_delta());
      break;
    case v1::GenerateResponse::kFinished:
      is_new = take_finished(response->finished());
      break;
    case v1::GenerateResponse::kPromptLogprobs:
      is_new = take_prompt_logprobs(response->mutable_prompt_logprobs());
      break;
    case v1::GenerateResponse::EVENT_NOT_SET:
      break;
  }
  if (is_new) {
    lost_for_ = {};
    delay_ = kFirstDelay;
    last_failure_.clear();
  }
  return is_new;
}

Milliseconds Reading::lost(const Failure& failure, bool was_reached) {
  const Milliseconds lost_for = count_loss();
  std::optional<Way> way = way_on(failure, was_reached);
  if (way == Way::kSendPlain) {
    request_->clear_attach_window_ms();
    way_ = Way::kSend;
    --num_sent_;
    return {};
  }
  const Milliseconds delay = std::max(delay_, failure.error.retry_after());
  if (!way || lost_for + delay > reconnect_timeout_) {
    is_over_ = true;
    throw told(failure.error);
  }
  last_failure_ = failure.error.what();
  delay_ = std::min(2 * delay_, kMaxDelay);
  way_ = *way;
  return delay;
}

// A deadline says what it was that took so long.
Error Reading::told(const Error& error) const {
  if (error.code() != StatusCode::DEADLINE_EXCEEDED || last_failure_.empty()) return error;
  return Error(error.code(), "the timeout passed; before that: " + last_failure_);
}

bool Reading::ended() {
  // How many answers an attached request has may not be known here.
  is_over_ = is_over_ || !request_;
  return is_over_;
}

// For how long there was no stream. Time with a server counts back, also where it had no news yet.
Milliseconds Reading::count_loss() {
  const auto now = Clock::now();
  if (lost_at_) {
    lost_for_ += since(*lost_at_, now);
  } else {
    lost_for_ = std::max(Milliseconds{}, lost_for_ - since(began_at_, now));
  }
  lost_at_ = now;
  return lost_for_;
}

std::optional<Reading::Way> Reading::way_on(const Failure& failure, bool was_reached) {
  if (is_unread_) {
    is_unread_ = false;
    return Way::kSend;
  }
  if (failure.reason == "SLOW_READER") {
    // Nobody read since long before its last messages were taken here.
    heard_at_.reset();
    return Way::kAttach;
  }
  if (failure.is_loss) {
    if (!was_reached) return {};
    return !is_accepted_ && request_ ? Way::kSend : Way::kAttach;
  }
  if (request_) return way_on_of_request(failure);
  if (failure.error.code() == StatusCode::UNAVAILABLE) return Way::kAttach;
  return {};
}

std::optional<Reading::Way> Reading::way_on_of_request(const Failure& failure) {
  const bool attached = way_ != Way::kSend;
  switch (failure.error.code()) {
    case StatusCode::UNAVAILABLE:
      // After Accepted it is the request's own end: given up there, but not elsewhere. Else the
      // server starts or drains.
      return (attached && is_heard_) || !is_accepted_ ? Way::kSend : Way::kAttach;
    case StatusCode::FAILED_PRECONDITION:
      if (failure.reason != "EXPIRED_REQUEST") return {};
      [[fallthrough]];
    case StatusCode::NOT_FOUND:
    case StatusCode::UNIMPLEMENTED:
      if (attached) return Way::kSend;
      return {};
    case StatusCode::OUT_OF_RANGE:
      if (way_ == Way::kAttach) return Way::kAttachToAll;
      return {};
    case StatusCode::ALREADY_EXISTS:
      if (num_sent_ > 1 && !attached) return Way::kAttach;
      return {};
    case StatusCode::RESOURCE_EXHAUSTED:
      if (is_accepted_) return way_;
      return {};
    case StatusCode::INVALID_ARGUMENT:
      if (has_own_window_ && failure.error.field() == "attach_window_ms" &&
          request_->has_attach_window_ms())
        return Way::kSendPlain;
      return {};
    default:
      return {};
  }
}

bool Reading::take_accepted(const v1::Accepted& accepted) {
  is_heard_ = true;
  began_at_ = Clock::now();
  if (lost_at_) {
    lost_for_ += since(*lost_at_, began_at_);
    lost_at_.reset();
  }
  if (!request_) num_choices_ = accepted.num_choices();
  if (request_ && (is_accepted_ || num_sent_ > 1) &&
      accepted.seed() != request_->sampling().seed()) {
    is_over_ = true;
    throw Error(StatusCode::ALREADY_EXISTS,
                "a request of id \"" + id_ + "\" that is not this one is known to the server");
  }
  const bool is_new = !is_accepted_;
  is_accepted_ = true;
  return is_new;
}

bool Reading::take_delta(v1::Delta* delta) {
  try {
    return received_[delta->index()].take(delta);
  } catch (const Difference& difference) {
    throw Error(StatusCode::DATA_LOSS, "request \"" + id_ + "\" was computed anew, and answer " +
                                           std::to_string(delta->index()) +
                                           " is not the one that had begun: " + difference.what() +
                                           "; the servers there are not set up alike");
  }
}

bool Reading::take_finished(const v1::Finished& finished) {
  if (was_unread(finished)) {
    is_unread_ = true;
    return false;
  }
  const bool is_new = received_[finished.index()].finish();
  const auto num_finished = std::count_if(received_.begin(), received_.end(),
                                          [](const auto& one) { return one.second.is_finished(); });
  is_over_ = num_finished == num_choices_;
  return is_new;
}

// Its end is that nobody read it for as long as its attach window: to be sent anew.
bool Reading::was_unread(const v1::Finished& finished) const {
  return request_ && way_ != Way::kSend &&
         finished.finish_reason() == v1::FINISH_REASON_CANCELLED &&
         silence_ >= Milliseconds(request_->attach_window_ms());
}

bool Reading::take_prompt_logprobs(v1::PromptLogprobs* part) {
  const uint32_t first = part->first_token_index();
  const int num_known = first < next_prompt_ ? static_cast<int>(next_prompt_ - first) : 0;
  auto& logprobs = *part->mutable_logprobs();
  logprobs.DeleteSubrange(0, std::min(num_known, logprobs.size()));
  part->set_first_token_index(first + num_known);
  next_prompt_ = std::max(next_prompt_, part->first_token_index() + logprobs.size());
  return !logprobs.empty();
}

}  // namespace slotwise

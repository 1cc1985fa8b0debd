#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "failure.h"
#include "received.h"
#include "slotwise/client.h"

namespace slotwise {

// One request as its reader sees it: what came, and how to go on when the stream is lost.
//
// It has an id and a seed from the start: sent anew, it is the same request. What a new run repeats
// is compared with what came, and not told again.
class Reading {
 public:
  using Clock = std::chrono::steady_clock;
  using Request = std::variant<v1::GenerateRequest, v1::AttachRequest>;

  Reading(Request request, Milliseconds reconnect_timeout);

  const std::string& request_id() const { return id_; }
  // It has ended, by its last message or by a status: nothing is left to cancel.
  bool is_over() const { return is_over_; }
  // What to send for the next stream.
  Request next_call();
  // Cuts an event to what is new for the reader; whether anything is. Throws Error.
  bool take(v1::GenerateResponse* response);
  // The stream ended with a failure. How long to wait before next_call; throws Error where there is
  // no way on. was_reached: the server has answered once, so that what is lost may come back.
  Milliseconds lost(const Failure& failure, bool was_reached);
  // The stream ended without one; whether nothing is missing.
  bool ended();

 private:
  enum class Way {
    kSend,
    kAttach,
    // From the first token on, which are compared with those that came.
    kAttachToAll,
    // As the first time, but without an attach window: the server takes none.
    kSendPlain,
  };

  v1::AttachRequest attach_request();
  std::optional<Way> way_on(const Failure& failure, bool was_reached);
  std::optional<Way> way_on_of_request(const Failure& failure);
  bool take_accepted(const v1::Accepted& accepted);
  bool take_delta(v1::Delta* delta);
  bool take_finished(const v1::Finished& finished);
  bool take_prompt_logprobs(v1::PromptLogprobs* part);
  bool was_unread(const v1::Finished& finished) const;
  Milliseconds count_loss();
  Error told(const Error& error) const;

  std::string id_;
  // None: it was sent by another.
  std::optional<v1::GenerateRequest> request_;
  Way way_;
  bool is_over_ = false;
  bool has_own_window_ = false;
  bool is_accepted_ = false;
  // The present stream has begun.
  bool is_heard_ = false;
  bool is_unread_ = false;
  int num_sent_ = 0;
  uint32_t num_choices_ = 0;
  uint32_t next_prompt_ = 0;
  std::map<uint32_t, Received> received_;

  Milliseconds reconnect_timeout_;
  Milliseconds delay_;
  // Since when there is no stream, and for how long there was none since the last news.
  std::optional<Clock::time_point> lost_at_;
  Milliseconds lost_for_{};
  Clock::time_point began_at_ = Clock::now();
  std::string last_failure_;
  // When the server can last have known that somebody reads (none: long ago), and for how long it
  // could not.
  std::optional<Clock::time_point> heard_at_ = Clock::now();
  Clock::duration silence_{};
};

}  // namespace slotwise

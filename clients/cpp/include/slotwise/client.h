// A client of Slotwise.
//
//   slotwise::Client client("127.0.0.1:50051");
//   for (const auto& event : client.chat("What is the capital of France?"))
//     std::cout << event.delta().text() << std::flush;
//
// Requests and events are the messages of slotwise/v1/inference.proto.
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "slotwise/standard.pb.h"
#include "slotwise/v1/inference.pb.h"

namespace slotwise {

using Milliseconds = std::chrono::milliseconds;
using HealthStatus = standard::HealthCheckResponse::ServingStatus;

// PEM texts, not files. ca: who may sign the server's certificate; empty: whom gRPC trusts. cert
// and key: what this client shows. server_name: of the certificate, where the address has another.
struct Tls {
  std::string ca, cert, key, server_name;
};

struct ClientOptions {
  std::optional<Tls> tls;
  // Sent with every call; without TLS only to this machine, or anywhere with insecure_token.
  std::string token;
  bool insecure_token = false;
  // A stream that is lost goes on, unless there was no news for so long. 0: it is not tried.
  Milliseconds reconnect_timeout{60'000};
};

// A call failed: what() is the server's sentence.
class Error : public std::runtime_error {
 public:
  Error(grpc::StatusCode code, const std::string& message, std::string field = {},
        Milliseconds retry_after = {})
      : std::runtime_error(message),
        code_(code),
        field_(std::move(field)),
        retry_after_(retry_after) {}

  grpc::StatusCode code() const { return code_; }
  // "INVALID_ARGUMENT" and so on.
  const char* name() const;
  // Of INVALID_ARGUMENT: the first refused field, if the server named one.
  const std::string& field() const { return field_; }
  // Of RESOURCE_EXHAUSTED, the queue is full: when to try again, 0 if the server did not say.
  Milliseconds retry_after() const { return retry_after_; }

 private:
  grpc::StatusCode code_;
  std::string field_;
  Milliseconds retry_after_;
};

// The events of one request as they come: accepted, prompt_logprobs if asked for, delta, and one
// finished per choice. A lost connection, a server that was restarted and one that sends its
// clients elsewhere go by unseen: every token and every piece of text comes exactly once.
//
// A stream that is destroyed before its end cancels its request.
class Stream {
 public:
  class Iterator;
  class Impl;

  explicit Stream(std::unique_ptr<Impl> impl);
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  const std::string& request_id() const;
  // Waits for the next event; none: the stream has ended. Throws Error.
  std::optional<v1::GenerateResponse> next();
  // Ends the request and, at once, the stream. From any thread. Returns when the server knows of
  // it, or after a second.
  void cancel();
  // Stops reading and lets the request run, for its attach window, for Client::attach.
  void detach();

  Iterator begin();
  Iterator end();

 private:
  std::unique_ptr<Impl> impl_;
};

class Stream::Iterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = v1::GenerateResponse;
  using difference_type = std::ptrdiff_t;
  using pointer = const value_type*;
  using reference = const value_type&;

  Iterator() = default;
  explicit Iterator(Stream* stream) : stream_(stream) { ++*this; }
  reference operator*() const { return *event_; }
  pointer operator->() const { return &*event_; }
  Iterator& operator++() {
    event_ = stream_->next();
    return *this;
  }
  void operator++(int) { ++*this; }
  // Only whether there is an event: good for comparing with end().
  friend bool operator==(const Iterator& a, const Iterator& b) {
    return a.event_.has_value() == b.event_.has_value();
  }
  friend bool operator!=(const Iterator& a, const Iterator& b) { return !(a == b); }

 private:
  Stream* stream_ = nullptr;
  std::optional<value_type> event_;
};

// A connection to one server, for any number of threads. A timeout becomes the deadline of the
// call, which the server keeps too; none: there is no deadline. Every call throws Error.
class Client {
 public:
  using Timeout = std::optional<Milliseconds>;
  class Connection;

  // std::invalid_argument for a token that cannot be sent, or that everybody could read.
  explicit Client(const std::string& address = "127.0.0.1:50051",
                  const ClientOptions& options = {});

  // Where the request has no id, seed or attach window it gets them, so that it can go on.
  Stream generate(v1::GenerateRequest request, Timeout timeout = {});
  // One question in the chat format of the model; `request` has the rest.
  Stream chat(const std::string& question, v1::GenerateRequest request = {}, Timeout timeout = {});
  // Reads a request on from this token of its answer: one that runs, or ended not long ago.
  Stream attach(const std::string& request_id, uint32_t next_token_index = 0, Timeout timeout = {});
  Stream attach(v1::AttachRequest request, Timeout timeout = {});
  // The whole answer at once; it does not go on after a loss.
  v1::CompleteResponse complete(const v1::GenerateRequest& request, Timeout timeout = {});
  // Ends a request of any connection. NOT_FOUND: it does not wait or run.
  void cancel(const std::string& request_id, Timeout timeout = {});
  // "slotwise.v1.Inference": requests are taken; "": the process lives.
  HealthStatus health(const std::string& service = "slotwise.v1.Inference", Timeout timeout = {});

 private:
  std::shared_ptr<Connection> connection_;
};

}  // namespace slotwise

#include "failure.h"

#include <string_view>

namespace slotwise {

namespace {

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// Whether it is of this type; then `message` is what it has.
template <typename Message>
bool unpack(const standard::Detail& detail, const char* type, Message* message) {
  return ends_with(detail.type_url(), type) && message->ParseFromString(detail.value());
}

Milliseconds milliseconds(const standard::RetryInfo::Duration& delay) {
  return Milliseconds(delay.seconds() * 1000 + delay.nanos() / 1'000'000);
}

// What gRPC says, by codes that a server has too, of a connection that broke.
bool speaks_of_loss(const std::string& message) {
  for (const char* words :
       {"RST_STREAM", "Stream removed", "Socket closed", "GOAWAY", "http2", "EOF"})
    if (message.find(words) != std::string::npos) return true;
  return false;
}

bool is_loss(const grpc::Status& status) {
  if (!status.error_details().empty()) return false;
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
      return true;
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:
      return speaks_of_loss(status.error_message());
    default:
      return false;
  }
}

}  // namespace

Failure failure_of(const grpc::Status& status, const std::string& address) {
  standard::Status details;
  details.ParseFromString(status.error_details());
  std::string field, reason;
  Milliseconds retry_after{};
  for (const standard::Detail& detail : details.details()) {
    standard::BadRequest refused;
    standard::RetryInfo retry;
    standard::ErrorInfo info;
    if (unpack(detail, "/google.rpc.BadRequest", &refused) && refused.field_violations_size() > 0)
      field = refused.field_violations(0).field();
    if (unpack(detail, "/google.rpc.RetryInfo", &retry))
      retry_after = milliseconds(retry.retry_delay());
    if (unpack(detail, "/google.rpc.ErrorInfo", &info)) reason = info.reason();
  }
  std::string message = status.error_message();
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE && status.error_details().empty())
    message = "no answer from " + address + ": " + message;
  return {{status.error_code(), message, field, retry_after}, reason, is_loss(status)};
}

const char* Error::name() const {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  const auto code = static_cast<size_t>(code_);
  return code < std::size(kNames) ? kNames[code] : "UNKNOWN";
}

}  // namespace slotwise

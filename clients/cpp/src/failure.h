#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <string>

#include "slotwise/client.h"

namespace slotwise {

// What a call ended with, as far as it says how to go on.
struct Failure {
  Error error;
  // Of google.rpc.ErrorInfo: "EXPIRED_REQUEST" and so on.
  std::string reason;
  // It broke off on the way, without a word of the server.
  bool is_loss = false;
};

// The status of a call that has ended, and is not OK.
Failure failure_of(const grpc::Status& status, const std::string& address);

}  // namespace slotwise

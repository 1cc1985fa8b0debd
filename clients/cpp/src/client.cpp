#include "slotwise/client.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>

#include "reading.h"
#include "slotwise/v1/inference.grpc.pb.h"

namespace slotwise {

namespace {

using SystemClock = std::chrono::system_clock;
using Deadline = std::optional<SystemClock::time_point>;

constexpr int kMaxMessageBytes = 64 << 20;
// For how long the end of a stream waits until the server knows of it.
constexpr Milliseconds kCancelTimeout{1'000};

Deadline deadline_after(Client::Timeout timeout) {
  if (!timeout) return {};
  // What is too long for the clock becomes the longest.
  const auto now = SystemClock::now();
  const auto left = SystemClock::time_point::max() - now;
  return now + std::min(*timeout, std::chrono::duration_cast<Milliseconds>(left));
}

bool starts_with(const std::string& text, const std::string& begin) {
  return text.compare(0, begin.size(), begin) == 0;
}

// The address stays on this machine. What is not understood does not.
bool is_local(std::string address) {
  if (starts_with(address, "unix:") || starts_with(address, "unix-abstract:")) return true;
  address.erase(0, address.rfind('/') + 1);
  for (const char* scheme : {"dns:", "ipv4:", "ipv6:"})
    if (starts_with(address, scheme)) address.erase(0, std::string(scheme).size());
  const std::string host = address.substr(0, address.rfind(':'));
  const bool is_ipv4 = host.find_first_not_of("0123456789.") == std::string::npos;
  return host == "localhost" || host == "[::1]" || (is_ipv4 && starts_with(host, "127."));
}

void check_token(const ClientOptions& options, const std::string& address) {
  const auto is_good = [](unsigned char c) { return c > ' ' && c < 0x7f; };
  // The token itself is never shown.
  if (!std::all_of(options.token.begin(), options.token.end(), is_good))
    throw std::invalid_argument("the token has characters besides printable ASCII");
  if (!options.token.empty() && !options.tls && !options.insecure_token && !is_local(address))
    throw std::invalid_argument("the token would go to " + address +
                                " unencrypted; use TLS, or allow it (insecure_token) where the "
                                "network is trusted");
}

// Pings find a dead peer behind a silent connection; dialling again starts fast, so that waiting
// for a server that is just starting does not overshoot by a long back-off.
grpc::ChannelArguments channel_arguments(const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // This is how long one attempt may take, handshakes included.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  if (options.tls && !options.tls->server_name.empty())
    arguments.SetSslTargetNameOverride(options.tls->server_name);
  return arguments;
}

std::shared_ptr<grpc::ChannelCredentials> credentials(const ClientOptions& options) {
  if (!options.tls) return grpc::InsecureChannelCredentials();
  return grpc::SslCredentials({options.tls->ca, options.tls->key, options.tls->cert});
}

}  // namespace

class Client::Connection {
 public:
  using HealthStub =
      grpc::TemplatedGenericStub<standard::HealthCheckRequest, standard::HealthCheckResponse>;

  Connection(std::string server, const ClientOptions& options)
      : address(std::move(server)),
        reconnect_timeout(options.reconnect_timeout),
        channel(
            grpc::CreateCustomChannel(address, credentials(options), channel_arguments(options))),
        stub(v1::Inference::NewStub(channel)),
        health_stub(channel),
        token_(options.token) {}

  std::unique_ptr<grpc::ClientContext> context(Deadline deadline) const {
    auto context = std::make_unique<grpc::ClientContext>();
    if (!token_.empty()) context->AddMetadata("authorization", "Bearer " + token_);
    if (deadline) context->set_deadline(*deadline);
    return context;
  }

  void check(const grpc::Status& status) {
    if (!status.ok()) throw failure_of(status, address).error;
    was_reached = true;
  }

  void cancel(const std::string& request_id, Deadline deadline) {
    v1::CancelRequest request;
    request.set_request_id(request_id);
    v1::CancelResponse response;
    check(stub->Cancel(context(deadline).get(), request, &response));
  }

  const std::string address;
  const Milliseconds reconnect_timeout;
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::Inference::Stub> stub;
  HealthStub health_stub;
  // It has answered once: what is lost now may come back.
  std::atomic<bool> was_reached = false;

 private:
  const std::string token_;
};

class Stream::Impl {
 public:
  Impl(std::shared_ptr<Client::Connection> connection, Reading::Request request,
       Client::Timeout timeout)
      : connection_(std::move(connection)),
        deadline_(deadline_after(timeout)),
        reading_(std::move(request), connection_->reconnect_timeout) {
    open();
  }

  ~Impl() {
    cancel();
    // gRPC wants a call to be read to its end.
    if (reader_) finish();
  }

  const std::string& request_id() const { return reading_.request_id(); }

  std::optional<v1::GenerateResponse> next() {
    v1::GenerateResponse response;
    while (reader_ || reopen()) {
      if (!reader_->Read(&response)) {
        const grpc::Status status = finish();
        if (is_closed() || reading_.is_over() || (status.ok() && reading_.ended())) break;
        lose(status);
      } else if (take(&response)) {
        return response;
      }
    }
    return {};
  }

  void cancel() {
    if (!close() || reading_.is_over()) return;
    try {
      connection_->cancel(reading_.request_id(), SystemClock::now() + kCancelTimeout);
    } catch (const Error&) {
      // Best effort: what the server has not heard of is ended by its attach window.
    }
  }

  void detach() { close(); }

 private:
  bool take(v1::GenerateResponse* response) {
    connection_->was_reached = true;
    try {
      return reading_.take(response);
    } catch (const Error&) {
      // A new run that is not the same one is nobody's.
      cancel();
      throw;
    }
  }

  void lose(const grpc::Status& status) {
    const Failure early{
        Error(grpc::StatusCode::INTERNAL,
              "the stream of request \"" + request_id() + "\" ended before its answer did"),
        {},
        true};
    const Failure failure = status.ok() ? early : failure_of(status, connection_->address);
    delay_ = reading_.lost(failure, connection_->was_reached);
  }

  // Whether there is a stream again; false: there is to be none.
  bool reopen() {
    std::unique_lock lock(mutex_);
    if (is_closed_ || reading_.is_over()) return false;
    auto until = SystemClock::now() + delay_;
    if (deadline_) until = std::min(until, *deadline_);
    if (closed_.wait_until(lock, until, [this] { return is_closed_; })) return false;
    lock.unlock();
    open();
    return true;
  }

  void open() {
    auto context = connection_->context(deadline_);
    const Reading::Request request = reading_.next_call();
    if (const auto* generate = std::get_if<v1::GenerateRequest>(&request))
      reader_ = connection_->stub->Generate(context.get(), *generate);
    else
      reader_ = connection_->stub->Attach(context.get(), std::get<v1::AttachRequest>(request));
    std::lock_guard lock(mutex_);
    context_ = std::move(context);
    // Closed by another thread just now, which saw no call.
    if (is_closed_) context_->TryCancel();
  }

  grpc::Status finish() {
    v1::GenerateResponse rest;
    while (reader_->Read(&rest)) {
    }
    const grpc::Status status = reader_->Finish();
    reader_.reset();
    std::lock_guard lock(mutex_);
    context_.reset();
    return status;
  }

  // False: it was before.
  bool close() {
    std::lock_guard lock(mutex_);
    if (is_closed_) return false;
    is_closed_ = true;
    if (context_) context_->TryCancel();
    closed_.notify_all();
    return true;
  }

  bool is_closed() {
    std::lock_guard lock(mutex_);
    return is_closed_;
  }

  const std::shared_ptr<Client::Connection> connection_;
  const Deadline deadline_;
  Reading reading_;
  Milliseconds delay_{};
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;

  // Between the reader and who closes: the call's context, and that it is closed.
  std::mutex mutex_;
  std::condition_variable closed_;
  std::unique_ptr<grpc::ClientContext> context_;
  bool is_closed_ = false;
};

Stream::Stream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

const std::string& Stream::request_id() const { return impl_->request_id(); }
std::optional<v1::GenerateResponse> Stream::next() { return impl_->next(); }
void Stream::cancel() { impl_->cancel(); }
void Stream::detach() { impl_->detach(); }
Stream::Iterator Stream::begin() { return Iterator(this); }
Stream::Iterator Stream::end() { return {}; }

Client::Client(const std::string& address, const ClientOptions& options) {
  check_token(options, address);
  connection_ = std::make_shared<Connection>(address, options);
}

Stream Client::generate(v1::GenerateRequest request, Timeout timeout) {
  return Stream(std::make_unique<Stream::Impl>(connection_, std::move(request), timeout));
}

Stream Client::chat(const std::string& question, v1::GenerateRequest request, Timeout timeout) {
  v1::ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(question);
  return generate(std::move(request), timeout);
}

Stream Client::attach(const std::string& request_id, uint32_t next_token_index, Timeout timeout) {
  v1::AttachRequest request;
  request.set_request_id(request_id);
  request.set_next_token_index(next_token_index);
  return attach(std::move(request), timeout);
}

Stream Client::attach(v1::AttachRequest request, Timeout timeout) {
  return Stream(std::make_unique<Stream::Impl>(connection_, std::move(request), timeout));
}

v1::CompleteResponse Client::complete(const v1::GenerateRequest& request, Timeout timeout) {
  const auto context = connection_->context(deadline_after(timeout));
  v1::CompleteResponse response;
  connection_->check(connection_->stub->Complete(context.get(), request, &response));
  return response;
}

void Client::cancel(const std::string& request_id, Timeout timeout) {
  connection_->cancel(request_id, deadline_after(timeout));
}

HealthStatus Client::health(const std::string& service, Timeout timeout) {
  const auto context = connection_->context(deadline_after(timeout));
  standard::HealthCheckRequest request;
  request.set_service(service);
  standard::HealthCheckResponse response;
  // Shared: the callback may still be in it when the result is there.
  const auto done = std::make_shared<std::promise<grpc::Status>>();
  connection_->health_stub.UnaryCall(context.get(), "/grpc.health.v1.Health/Check", {}, &request,
                                     &response,
                                     [done](grpc::Status status) { done->set_value(status); });
  connection_->check(done->get_future().get());
  return response.status();
}

}  // namespace slotwise

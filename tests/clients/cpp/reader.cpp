// reader ADDRESS generate|attach|complete|cancel REQUEST [NAME=VALUE...]: prints what a stream
// tells, for the tests. The request, and the events, are serialized and in hex. Names:
// reconnect_ms, timeout_ms, token; drop_after: after so many events the stream is dropped, and the
// end of the input waited for; detach_after: after so many events it is left.
#include <slotwise/client.h>

#include <iostream>
#include <map>

using slotwise::Client;
using slotwise::Milliseconds;
using slotwise::Stream;

std::string unhex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); i += 2) bytes += std::stoi(text.substr(i, 2), nullptr, 16);
  return bytes;
}

std::string hex(const std::string& bytes) {
  std::string text;
  for (unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

template <typename Request>
Request parsed(const std::string& text) {
  Request request;
  if (!request.ParseFromString(unhex(text))) throw std::invalid_argument("no request");
  return request;
}

Stream start(Client& client, const std::string& kind, const std::string& request,
             Client::Timeout timeout) {
  if (kind == "attach") return client.attach(parsed<slotwise::v1::AttachRequest>(request), timeout);
  return client.generate(parsed<slotwise::v1::GenerateRequest>(request), timeout);
}

void read(Client& client, const std::string& kind, const std::string& request,
          std::map<std::string, std::string>& options) {
  Client::Timeout timeout;
  if (options.count("timeout_ms")) timeout = Milliseconds(std::stoll(options["timeout_ms"]));
  const auto number = [&](const char* name) {
    return options.count(name) ? std::stoi(options[name]) : -1;
  };
  auto stream = start(client, kind, request, timeout);
  int num_events = 0;
  while (num_events != number("drop_after")) {
    if (num_events == number("detach_after")) stream.detach();
    const auto event = stream.next();
    if (!event) break;
    ++num_events;
    std::cout << "event " << hex(event->SerializeAsString()) << std::endl;
  }
}

int main(int argc, char** argv) try {
  std::map<std::string, std::string> options;
  for (int i = 4; i < argc; ++i) {
    const std::string option = argv[i];
    options[option.substr(0, option.find('='))] = option.substr(option.find('=') + 1);
  }
  slotwise::ClientOptions settings;
  settings.token = options["token"];
  if (options.count("reconnect_ms"))
    settings.reconnect_timeout = Milliseconds(std::stoi(options["reconnect_ms"]));
  Client client(argv[1], settings);
  client.health("");
  const std::string kind = argv[2];
  if (kind == "complete") {
    const auto answer = client.complete(parsed<slotwise::v1::GenerateRequest>(argv[3]));
    std::cout << "answer " << hex(answer.SerializeAsString()) << std::endl;
  } else if (kind == "cancel") {
    client.cancel(parsed<slotwise::v1::CancelRequest>(argv[3]).request_id());
  } else {
    read(client, kind, argv[3], options);
  }
  if (options.count("drop_after")) {
    std::cout << "dropped" << std::endl;
    std::cin.get();
  }
} catch (const slotwise::Error& error) {
  std::cout << "error " << error.name() << '\t' << error.field() << '\t'
            << error.retry_after().count() << '\t' << error.what() << std::endl;
} catch (const std::invalid_argument& error) {
  std::cout << "refused " << error.what() << std::endl;
}

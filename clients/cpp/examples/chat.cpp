// chat ADDRESS QUESTION [MAX_NEW_TOKENS]: streams an answer.
#include <slotwise/client.h>

#include <iostream>

int main(int argc, char** argv) try {
  if (argc < 3) return std::cerr << "usage: chat ADDRESS QUESTION [MAX_NEW_TOKENS]\n", 2;
  slotwise::v1::GenerateRequest request;
  request.mutable_sampling()->set_temperature(0);
  request.set_max_new_tokens(argc > 3 ? std::stoul(argv[3]) : 64);

  slotwise::Client client(argv[1]);
  for (const auto& event : client.chat(argv[2], request))
    std::cout << event.delta().text() << std::flush;
  std::cout << '\n';
} catch (const slotwise::Error& error) {
  std::cerr << "error: " << error.name() << ": " << error.what() << '\n';
  if (!error.field().empty()) std::cerr << "field: " << error.field() << '\n';
  return 1;
}

// attach ADDRESS REQUEST_ID [NEXT]: reads a request on, from token NEXT of its answer.
#include <slotwise/client.h>

#include <iostream>

int main(int argc, char** argv) try {
  if (argc < 3) return std::cerr << "usage: attach ADDRESS REQUEST_ID [NEXT]\n", 2;
  slotwise::Client client(argv[1]);
  for (const auto& event : client.attach(argv[2], argc > 3 ? std::stoul(argv[3]) : 0))
    std::cout << event.delta().text() << std::flush;
  std::cout << '\n';
} catch (const slotwise::Error& error) {
  std::cerr << "error: " << error.name() << ": " << error.what() << '\n';
  return 1;
}

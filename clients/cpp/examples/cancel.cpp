// cancel ADDRESS QUESTION NUM_EVENTS: reads so many events of an answer, then stops it.
#include <slotwise/client.h>

#include <iostream>

int main(int argc, char** argv) try {
  if (argc < 4) return std::cerr << "usage: cancel ADDRESS QUESTION NUM_EVENTS\n", 2;
  slotwise::Client client(argv[1]);
  auto stream = client.chat(argv[2]);
  for (int i = std::stoi(argv[3]); i > 0; --i)
    if (auto event = stream.next()) std::cout << event->delta().text() << std::flush;

  // The destructor of a stream does it too; client.cancel(request_id) ends any other request.
  stream.cancel();
  std::cout << "\ncancelled " << stream.request_id() << '\n';
} catch (const slotwise::Error& error) {
  std::cerr << "error: " << error.name() << ": " << error.what() << '\n';
  return 1;
}

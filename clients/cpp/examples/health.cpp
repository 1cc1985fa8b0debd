// health ADDRESS [SERVICE]: exits 0 when it is SERVING, 1 when not. By default it is asked whether
// requests are taken; of SERVICE "" whether the process lives.
#include <slotwise/client.h>

#include <iostream>

int main(int argc, char** argv) try {
  if (argc < 2) return std::cerr << "usage: health ADDRESS [SERVICE]\n", 2;
  slotwise::Client client(argv[1]);
  const auto status =
      client.health(argc > 2 ? argv[2] : "slotwise.v1.Inference", slotwise::Milliseconds(5'000));
  const bool is_serving = status == slotwise::standard::HealthCheckResponse::SERVING;
  (is_serving ? std::cout : std::cerr)
      << slotwise::standard::HealthCheckResponse::ServingStatus_Name(status) << '\n';
  return is_serving ? 0 : 1;
} catch (const slotwise::Error& error) {
  std::cerr << "error: " << error.name() << ": " << error.what() << '\n';
  return 1;
}

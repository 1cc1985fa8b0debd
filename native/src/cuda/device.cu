// The devices, and what launches need to know of them.
#include <algorithm>
#include <vector>

#include "launch.cuh"

namespace slotwise {

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

namespace cuda {

namespace {

thread_local bool uses_portable = false;

const std::vector<DeviceInfo>& infos() {
  static const std::vector<DeviceInfo> infos = [] {
    std::vector<DeviceInfo> found(static_cast<size_t>(cuda_device_count()));
    for (size_t i = 0; i < found.size(); ++i) {
      const int device = static_cast<int>(i);
      const auto read = [&](int& value, cudaDeviceAttr attribute) {
        check(cudaDeviceGetAttribute(&value, attribute, device), "reading a device's properties");
      };
      read(found[i].major, cudaDevAttrComputeCapabilityMajor);
      read(found[i].minor, cudaDevAttrComputeCapabilityMinor);
      read(found[i].num_sms, cudaDevAttrMultiProcessorCount);
      int shared_bytes = 0;
      read(shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
      found[i].block_shared_bytes = static_cast<size_t>(shared_bytes);
    }
    return found;
  }();
  return infos;
}

}  // namespace

void use_device(int device, bool portable) {
  check(cudaSetDevice(device), "choosing a device");
  uses_portable = portable;
}

DeviceInfo device_info() {
  int device = 0;
  check(cudaGetDevice(&device), "finding the current device");
  DeviceInfo info = infos().at(static_cast<size_t>(device));
  if (uses_portable) info.major = std::min(info.major, 8);
  return info;
}

}  // namespace cuda
}  // namespace slotwise

#pragma once

namespace slotwise {

// Devices that CUDA can use now; 0 in a build without CUDA, without a driver or without a device.
int cuda_device_count();

inline bool cuda_available() { return cuda_device_count() > 0; }

}  // namespace slotwise

// How ranks hand data to each other: a rank writes into the memory of the others and reads only its
// own. There are two ways; both count their messages alike on every rank (the epoch of a row or of
// a lane, in device memory, so that a captured graph can be replayed), and both have two slots,
// used in turn.
//
// Packets, for messages of a few rows: every 8 bytes carry 4 of data and the message's flag, so a
// reader knows from the data itself that it has come; there is one crossing and no fence.
// Why a slot is free when it is used again: message e of a row goes where e - 2 was. It is sent
// after the sender received the peer's part of e - 1 (by an earlier kernel), and the peer sent that
// after its kernel of e - 2 had ended. Readers leave zeros behind, so that no old flag is ever met.
//
// Chunks, for the rest: a block (a lane) writes 16 KB to each peer, then the chunk's number behind
// a release; the reader acquires the number before it reads. Chunk e of a lane goes where e - 2
// was, after the sender saw the peer's number e - 1, which the peer's block wrote after all its
// threads had read e - 2.
//
// A kernel waits only for the same kernel of its peers, block by block, and all its blocks are
// running or done when a successor's start; so waiting blocks never stand in the way of those that
// they wait for.
#pragma once

#include "launch.cuh"
#include "slotwise/all_reduce.h"
#include "vectors.cuh"

namespace slotwise::cuda {

constexpr int kChunkLanes = 256;
constexpr int kChunkThreads = 256;
constexpr int kChunkUnits = 4;  // of each thread
constexpr int64_t kChunkBytes = int64_t{16} * kChunkUnits * kChunkThreads;

struct PeerView {
  int rank;
  int world_size;
  int64_t max_rows;
  int64_t row_units;  // of 16 bytes of data
  uint64_t timeout_ns;
  char* buffers[kMaxRanks];  // by rank; each begins with a PeerState
  int32_t* failed_on_host;
};

struct PeerState {
  int32_t failed;
  uint32_t row_epochs[kMaxSumRows];
  uint32_t lane_epochs[kChunkLanes];
  uint32_t arrived[kMaxRanks][kChunkLanes];  // written by the peers: the last chunk of the lane
};

// A packet: two times 4 bytes of data and the flag above them. 8 bytes are written as one.
using Packet = ulonglong2;
constexpr int kUnitPackets = 2;

// The buffer: PeerState; packets [slot, sender, row, packet]; chunks [slot, sender, lane].
constexpr int64_t kPacketsOffset = (sizeof(PeerState) + 255) / 256 * 256;

inline __host__ __device__ int64_t packets_index(const PeerView& view, int slot, int sender,
                                                 int64_t row) {
  return ((slot * view.world_size + sender) * view.max_rows + row) * view.row_units * kUnitPackets;
}

inline __host__ __device__ int64_t chunks_offset(const PeerView& view) {
  return kPacketsOffset + packets_index(view, 2, 0, 0) * static_cast<int64_t>(sizeof(Packet));
}

inline __host__ __device__ int64_t chunk_offset(const PeerView& view, int slot, int sender,
                                                int lane) {
  return chunks_offset(view) +
         (static_cast<int64_t>(slot * view.world_size + sender) * kChunkLanes + lane) * kChunkBytes;
}

inline int64_t buffer_bytes(const PeerView& view) { return chunk_offset(view, 2, 0, 0); }

__device__ __forceinline__ PeerState& own_state(const PeerView& view) {
  return *reinterpret_cast<PeerState*>(view.buffers[view.rank]);
}

__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// The time at which a thread that waits gives up, 0 once that is over, the host has aborted the
// group or it has failed: then no thread waits any more. The host's word is far away; a peer that
// comes in time has nobody read it.
__device__ __forceinline__ uint64_t wait_longer(const PeerView& view, uint64_t deadline) {
  volatile int32_t* failed = &own_state(view).failed;
  if (*failed != 0) return 0;
  const uint64_t now = clock_ns();
  if (deadline == 0) return now + view.timeout_ns;
  volatile int32_t* failed_on_host = view.failed_on_host;
  if (now < deadline && *failed_on_host == 0) return deadline;
  *failed = 1;
  *failed_on_host = 1;
  return 0;
}

class Patience {
 public:
  __device__ __forceinline__ explicit Patience(const PeerView& view) : view_(view) {}

  __device__ __forceinline__ bool lasts() {
    if ((++tries_ & 255) != 0) return true;
    deadline_ = wait_longer(view_, deadline_);
    return deadline_ != 0;
  }

 private:
  const PeerView& view_;
  uint32_t tries_ = 0;
  uint64_t deadline_ = 0;
};

// 16 bytes of data.
template <typename T>
struct alignas(16) Unit {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

// The first `count` of a unit's elements, zeros for the rest; aligned: source is at 16 bytes.
template <typename T>
__device__ __forceinline__ Unit<T> load_unit(const T* source, int64_t count, bool aligned) {
  Unit<T> unit;
  if (aligned && count >= Unit<T>::kSize) {
    *reinterpret_cast<uint4*>(unit.values) = *reinterpret_cast<const uint4*>(source);
  } else {
#pragma unroll
    for (int i = 0; i < Unit<T>::kSize; ++i) {
      unit.values[i] = i < count ? source[i] : round_to<T>(0.0f);
    }
  }
  return unit;
}

template <typename T>
__device__ __forceinline__ void store_unit(const Unit<T>& unit, T* target, int64_t count,
                                           bool aligned) {
  if (aligned && count >= Unit<T>::kSize) {
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(unit.values);
  } else {
#pragma unroll
    for (int i = 0; i < Unit<T>::kSize; ++i) {
      if (i < count) target[i] = unit.values[i];
    }
  }
}

// A sum begins with rank 0's part as it is; the others are added in rank order.
template <typename T>
__device__ __forceinline__ void add_part(int rank, const Unit<T>& part,
                                         float (&total)[Unit<T>::kSize]) {
#pragma unroll
  for (int i = 0; i < Unit<T>::kSize; ++i) {
    const float value = to_float(part.values[i]);
    total[i] = rank == 0 ? value : __fadd_rn(total[i], value);
  }
}

template <typename T>
__device__ __forceinline__ Unit<T> rounded_unit(const float (&total)[Unit<T>::kSize]) {
  Unit<T> unit;
#pragma unroll
  for (int i = 0; i < Unit<T>::kSize; ++i) unit.values[i] = round_to<T>(total[i]);
  return unit;
}

// The message of one row in packets. Unit u of `num_units` is packets u and num_units + u.
class PacketRow {
 public:
  // One thread of the row's block calls finish() at the end, when all have called this.
  __device__ __forceinline__ PacketRow(const PeerView& view, int row, int64_t num_units)
      : view_(view), row_(row), num_units_(num_units) {
    epoch_ = own_state(view).row_epochs[row] + 1;
  }

  __device__ __forceinline__ void finish() const { own_state(view_).row_epochs[row_] = epoch_; }

  template <typename T>
  __device__ __forceinline__ void send(int64_t u, const Unit<T>& unit) const {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(unit.values);
    for (int peer = 0; peer < view_.world_size; ++peer) {
      if (peer == view_.rank) continue;
      Packet* packets = at(peer, view_.rank) + u;
      store(packets, words[0], words[1]);
      store(packets + num_units_, words[2], words[3]);
    }
  }

  // Waits for the unit of `sender`.
  template <typename T>
  __device__ __forceinline__ Unit<T> receive(int64_t u, int sender) const {
    Packet* packets = at(view_.rank, sender) + u;
    Patience patience(view_);
    Packet low, high;
    do {
      low = load(packets);
      high = load(packets + num_units_);
    } while (!(complete(low) && complete(high)) && patience.lasts());
    *packets = make_ulonglong2(0, 0);
    packets[num_units_] = make_ulonglong2(0, 0);
    Unit<T> unit;
    *reinterpret_cast<uint4*>(unit.values) =
        make_uint4(static_cast<uint32_t>(low.x), static_cast<uint32_t>(low.y),
                   static_cast<uint32_t>(high.x), static_cast<uint32_t>(high.y));
    return unit;
  }

  // The sum of the ranks' units.
  template <typename T>
  __device__ __forceinline__ void sum(int64_t u, const Unit<T>& own,
                                      float (&total)[Unit<T>::kSize]) const {
    for (int rank = 0; rank < view_.world_size; ++rank) {
      add_part(rank, rank == view_.rank ? own : receive<T>(u, rank), total);
    }
  }

 private:
  // Odd, so not the zeros that readers leave.
  __device__ __forceinline__ uint32_t flag() const { return epoch_ << 1 | 1; }

  __device__ __forceinline__ Packet* at(int owner, int sender) const {
    return reinterpret_cast<Packet*>(view_.buffers[owner] + kPacketsOffset) +
           packets_index(view_, static_cast<int>(epoch_ & 1), sender, row_);
  }

  __device__ __forceinline__ void store(Packet* target, uint32_t first, uint32_t second) const {
    const uint64_t flag_bits = static_cast<uint64_t>(flag()) << 32;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(target),
                 "l"(flag_bits | first), "l"(flag_bits | second)
                 : "memory");
  }

  static __device__ __forceinline__ Packet load(const Packet* source) {
    Packet packet;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(packet.x), "=l"(packet.y)
                 : "l"(source)
                 : "memory");
    return packet;
  }

  __device__ __forceinline__ bool complete(const Packet& packet) const {
    return packet.x >> 32 == flag() && packet.y >> 32 == flag();
  }

  const PeerView& view_;
  int64_t row_;
  int64_t num_units_;
  uint32_t epoch_;
};

// The chunks of one block, one after the other: next(), send(), exchange(), receive(); finish() at
// the end. All threads of the block make the same calls. Thread t holds the units
// i * kChunkThreads + t of a chunk.
class ChunkLane {
 public:
  __device__ __forceinline__ explicit ChunkLane(const PeerView& view)
      : view_(view), lane_(blockIdx.x), epoch_(own_state(view).lane_epochs[blockIdx.x]) {}

  __device__ __forceinline__ void next() { ++epoch_; }

  template <typename T>
  __device__ __forceinline__ void send(int i, const Unit<T>& unit) const {
    for (int peer = 0; peer < view_.world_size; ++peer) {
      if (peer != view_.rank) *at(peer, view_.rank, i) = reinterpret_cast<const uint4&>(unit);
    }
  }

  // Says that the chunk is sent and waits for those of the peers: thread r talks with rank r.
  __device__ __forceinline__ void exchange() const {
    __syncthreads();
    const int peer = threadIdx.x;
    if (peer < view_.world_size && peer != view_.rank) {
      PeerState& state = *reinterpret_cast<PeerState*>(view_.buffers[peer]);
      asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&state.arrived[view_.rank][lane_]),
                   "r"(epoch_)
                   : "memory");
      Patience patience(view_);
      while (!has_come(peer) && patience.lasts()) {
      }
    }
    __syncthreads();
  }

  template <typename T>
  __device__ __forceinline__ Unit<T> receive(int i, int sender) const {
    Unit<T> unit;
    reinterpret_cast<uint4&>(unit) = __ldcg(at(view_.rank, sender, i));
    return unit;
  }

  // As PacketRow::sum, rounded once.
  template <typename T>
  __device__ __forceinline__ Unit<T> sum(int i, const Unit<T>& own) const {
    float total[Unit<T>::kSize];
    for (int rank = 0; rank < view_.world_size; ++rank) {
      add_part(rank, rank == view_.rank ? own : receive<T>(i, rank), total);
    }
    return rounded_unit<T>(total);
  }

  // After the last exchange().
  __device__ __forceinline__ void finish() const {
    if (threadIdx.x == 0) own_state(view_).lane_epochs[lane_] = epoch_;
  }

 private:
  __device__ __forceinline__ uint4* at(int owner, int sender, int i) const {
    const int64_t offset = chunk_offset(view_, static_cast<int>(epoch_ & 1), sender, lane_);
    return reinterpret_cast<uint4*>(view_.buffers[owner] + offset) + i * kChunkThreads +
           threadIdx.x;
  }

  // A peer may be one chunk ahead.
  __device__ __forceinline__ bool has_come(int peer) const {
    uint32_t number;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                 : "=r"(number)
                 : "l"(&own_state(view_).arrived[peer][lane_])
                 : "memory");
    return static_cast<int32_t>(number - epoch_) >= 0;
  }

  const PeerView& view_;
  int lane_;
  uint32_t epoch_;
};

}  // namespace slotwise::cuda

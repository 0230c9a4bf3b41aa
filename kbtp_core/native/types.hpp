// The records that cross the Python boundary; they mirror fabric/api.py octet for octet.
#pragma once

#include <chrono>

#include "bytes.hpp"

namespace kbtp {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

enum class Op : u8 {
    send = 0,
    send_invalidate = 1,
    send_se = 2,
    send_se_invalidate = 3,
    write = 4,
    read = 5,
    fetch_add = 6,
    cmp_swap = 7,
    immediate = 8,
    immediate_se = 9,
    receive = 16,
    receive_immediate = 17,
    loads = 18,
    connected = 32,
    disconnected = 33,
};

namespace wr_flag {
inline constexpr u8 signaled = 1;
inline constexpr u8 fence = 2;
inline constexpr u8 snapshot = 4;
}  // namespace wr_flag

enum class Status : u8 { ok = 0, flushed = 1, local_protection = 2, remote_access = 3, connect_failed = 4 };

namespace completion_flag {
inline constexpr u16 solicited = 1;
inline constexpr u16 invalidated = 2;
inline constexpr u16 remote = 4;
}  // namespace completion_flag

namespace access {
inline constexpr u8 local_write = 1;
inline constexpr u8 remote_read = 2;
inline constexpr u8 remote_write = 4;
inline constexpr u8 remote_atomic = 8;
inline constexpr u8 remote_invalidate = 16;
}  // namespace access

struct WorkRequest {
    u64 wr_id;
    Op op;
    u8 flags;
    u16 reserved;
    u32 length;
    u32 local_stag;
    u32 remote_stag;
    u64 local_offset;
    u64 remote_offset;
    u64 operand;
    u64 mask;
    u64 compare;
    u64 compare_mask;
};
static_assert(sizeof(WorkRequest) == 72);

struct ReceiveRequest {
    u64 wr_id;
    u64 offset;
    u32 stag;
    u32 length;
};
static_assert(sizeof(ReceiveRequest) == 24);

struct Completion {
    u64 wr_id;
    u32 qp;
    Op op;
    Status status;
    u16 flags;
    u32 length;
    u32 stag;
    u64 value;
};
static_assert(sizeof(Completion) == 32);

struct QueueLimits {
    u32 send_depth = 4096;
    u32 receive_depth = 1024;
    u16 ird = 32;
    u16 ord = 32;
    double startup_timeout_s = 5.0;
};

}  // namespace kbtp

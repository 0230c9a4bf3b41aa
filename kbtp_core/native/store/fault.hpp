// Faults on purpose, for tests: each place that writes, syncs or reads has a number and asks here what is to happen to it.
//
// Nothing is armed but by the plan that the constructor gets, and a plan comes from tests alone. Without one a visit is one increment.
#pragma once

#include <array>
#include <atomic>
#include <optional>
#include <vector>

#include "../bytes.hpp"

namespace kbtp::store {

enum class FaultPoint : u8 {
    extents_allocate,
    superblock_write,
    superblock_sync,
    superblock_rename,
    folder_sync,
    payload_write,
    payload_sync,
    record_write,
    record_sync,
    clear_write,
    clear_punch,
    clear_sync,
    payload_read,
    table_read,
    count
};

inline constexpr const char* kFaultPointNames[] = {
    "extents_allocate", "superblock_write", "superblock_sync", "superblock_rename", "folder_sync", "payload_write", "payload_sync",
    "record_write",     "record_sync",      "clear_write",     "clear_punch",       "clear_sync",  "payload_read",  "table_read"};
static_assert(std::size(kFaultPointNames) == static_cast<std::size_t>(FaultPoint::count));

enum class FaultAction : u8 { none, kill, kill_after, torn, flip, no_space, io_error, read_only, hang };

struct Fault {
    FaultPoint point{};
    u64 visit = 0;  // counted from 1; 0: every visit
    FaultAction action = FaultAction::none;
    u64 amount = 0;  // torn: octets written before the kill; flip: which bit; hang: milliseconds
};

// Any thread.
class Faults {
  public:
    explicit Faults(std::vector<Fault> plan) : plan_(std::move(plan)) {}

    // What is to happen to this visit. A kill happens here, a hang is slept through here, then goes on.
    Fault visit(FaultPoint point);
    [[noreturn]] static void die();

    u64 visits(FaultPoint point) const { return visits_[static_cast<std::size_t>(point)].load(std::memory_order_relaxed); }

  private:
    const std::vector<Fault> plan_;
    std::array<std::atomic<u64>, static_cast<std::size_t>(FaultPoint::count)> visits_{};
};

}  // namespace kbtp::store

// Faults on purpose, for tests: each place that writes, syncs or reads has a number and asks here what is to happen to it.
//
// Nothing is armed but by the plan that the constructor gets, and a plan comes from tests alone. Without one a visit is one increment.
#pragma once

#include <array>
#include <atomic>
#include <optional>
#include <vector>

#include "power_loss.hpp"

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

enum class FaultAction : u8 { none, kill, kill_after, lose, torn, flip, no_space, io_error, read_only, hang };

struct Fault {
    FaultPoint point{};
    u64 visit = 0;  // counted from 1; 0: every visit
    FaultAction action = FaultAction::none;
    u64 amount = 0;  // lose: 0 for all that was not synced, or a seed for some of it; torn: octets written before the kill; flip: which
                     // bit; hang: milliseconds
};

// The errno that the visitor is to report, or 0.
int error_of(const Fault& fault);

// Any thread.
class Faults {
  public:
    explicit Faults(std::vector<Fault> plan);

    // What is to happen to this visit. A kill happens here, and a hang is slept through here, then goes on, unless the caller may not
    // sleep.
    Fault visit(FaultPoint point, bool may_sleep = true);
    [[noreturn]] static void die();

    // Where what is not synced can get lost, or null.
    UnsyncedWrites* unsynced() { return loses_power_ ? &unsynced_ : nullptr; }

    u64 visits(FaultPoint point) const { return visits_[static_cast<std::size_t>(point)].load(std::memory_order_relaxed); }

  private:
    const std::vector<Fault> plan_;
    const bool loses_power_;
    UnsyncedWrites unsynced_;
    std::array<std::atomic<u64>, static_cast<std::size_t>(FaultPoint::count)> visits_{};
};

}  // namespace kbtp::store

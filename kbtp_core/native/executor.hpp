// The executor (KBTP draft section 8): plain LOADs answered from the block table, without the interpreter.
//
// It reads a 40-octet request and one 16-octet table entry, and says which bytes to write where and what to answer. What is
// not the plain case is left to the software target, which answers it; the initiator can't tell the two apart.
//
// How a block is kept while it is read: `readers` counts the native LOADs in flight for each table entry.
//   executor:  read entry  -> count up -> read entry again -> same? use it : count down, leave it to the target
//   target:    clear entry -> full fence -> read the count -> wait until it is zero -> give the block away
// Both sides store first and load second with sequential consistency, so one of them always sees the other.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "types.hpp"

namespace kbtp {

inline constexpr std::size_t kLoadRequest = 40, kLoadReply = 40;

struct LoadPlan {
    u64 entry;         // index in the table; holds one reader until `done`
    u64 block_offset;  // in the pool region
    u32 length;
    u32 remote_stag;
    u64 remote_offset;
    bool invalidate;  // answer with Send with Invalidate of remote_stag
    bool snapshot;    // the block is unsealed and may change while it is sent
    std::array<u8, kLoadReply> reply;
};

class Executor {
  public:
    // `table` points to `entries` entries of 16 octets and outlives the executor.
    Executor(const u8* table, u64 entries, u64 base_handle, u32 block_bytes)
        : table_(table), entries_(entries), base_handle_(base_handle), block_bytes_(block_bytes), readers_(entries) {}

    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    // Nothing: the target must answer this request. Progress thread.
    std::optional<LoadPlan> plan(std::span<const u8, kLoadRequest> request, u64 pool_bytes);
    void done(u64 entry) { readers_[entry].fetch_sub(1); }  // any thread

    // Any thread; see above.
    u32 readers(u64 entry) const { return entry < entries_ ? readers_[entry].load() : 0; }

  private:
    u32 load_state(u64 entry) const;  // Flags and Generation in one 32-bit load

    const u8* const table_;
    const u64 entries_, base_handle_;
    const u32 block_bytes_;
    std::vector<std::atomic<u32>> readers_;
};

}  // namespace kbtp

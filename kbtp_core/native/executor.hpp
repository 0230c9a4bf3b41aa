// The executor (KBTP draft section 8): plain requests answered from the block table and the ring, without the interpreter.
//
// This file is what all sessions of a target share: the table, the readers, and, where the ring owns the pool, the blocks. What one
// session has in progress is in executor_session.hpp. What is not the plain case is left to the software target, which answers it; the
// initiator can't tell the two apart.
//
// Who may write what, when both sides run at once, and this side on several progress threads (a session has one of them at a time):
//   a table entry    whoever serves the session in whose handle range it lies: this side while nothing of that session was handed up,
//                    the software target while it was. So no lock is needed, and the hand-over orders the memory.
//   a block's owner  the same, for a block belongs to one session until it is back in the ring.
//   a usage counter  the same: a session has its own.
//   the ring         `allocate` and `give_back` alone, both sides, under `ring_mutex_`.
//   the readers      anybody, see below.
//
// How a block is kept while it is read: `readers` counts the reads in flight for each table entry.
//   a reader:         read entry  -> count up -> read entry again -> same? use it : count down
//   software target:  clear entry -> full fence -> read the count -> wait until it is zero -> give the block away
//   executor:         count zero -> claimed, in one step -> clear entry -> give the block away -> claim dropped
// The first two store first and load second with sequential consistency, so one of them always sees the other. A claim turns new readers
// away, so a FREE is run here only while nothing reads.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "region.hpp"
#include "types.hpp"

namespace kbtp {

inline constexpr std::size_t kHeader = 24, kRequest = 40, kAnswer = 40;

using Answer = std::array<u8, kAnswer>;

namespace opcode {
inline constexpr u8 load = 3, store = 4, alloc_store = 5, free = 6, bind = 7, completion = 8;
}

// A request that is well-formed and carries no flag that only the software target knows.
struct Request {
    u8 opcode;
    u16 flags;
    u64 id, handle;
    u16 generation;
    u32 stag;
    u64 offset;
    u32 length;
    std::span<const u8> inlined;

    bool is_inline() const { return flags & 0x0001; }
    bool seals() const { return flags & 0x0002; }
    bool invalidates() const { return flags & 0x0008; }
    bool allows_unsealed() const { return flags & 0x0010; }

    // Nothing if it is not that plain (draft sections 5.1 and 5.2).
    static std::optional<Request> parse(std::span<const u8> message);
};

struct Entry {
    u16 flags, generation;
    u32 length;
    u64 block_offset;
    bool is_valid() const { return flags & 0x0001; }
    bool is_sealed() const { return flags & 0x0002; }
};

u16 next_generation(u16 generation);

// A COMPLETION with status OK; with an entry that no block is left of, without length and offset.
Answer encode_answer(const Request& request, const Entry& entry, bool with_block);

// A pool that its ring owns, as arrays of the software target (protocol/pool.py, ring.py, table.py, target.py), which outlive this.
struct PoolState {
    u8* memory;  // blocks * block_bytes octets
    u64 base_offset, blocks;
    u8* block_states;  // [blocks]
    u8* entry_states;  // [entries]
    u64* owners;       // [entries]
    u16* generations;  // [entries], the table's own copy
    u32* slots;        // [1 << log2_slots] of 16 octets
    u64* counters;     // Head, Tail
    u32 log2_slots;
    bool masked;
    bool clears;  // a freed block is zeroed
};

struct KeyedSession;  // keyed_session.hpp

// What a session may do beyond LOAD.
struct StoreGrant {
    u64 owner, handle_base, handle_count;
    u32 inline_bytes;
    u64 quota;
    u64* usage;                           // blocks owned now
    std::shared_ptr<KeyedSession> keyed;  // if it was granted STORE
};

class Executor {
  public:
    // `table` points to `entries` entries of 16 octets and outlives the executor.
    Executor(u8* table, u64 entries, u64 base_handle, u32 block_bytes, std::optional<PoolState> pool);
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    // Leave everything to the software target from now on.
    void stop() { stopped_.store(true); }
    bool is_stopped() const { return stopped_.load(); }

    u32 block_bytes() const { return block_bytes_; }
    bool has_pool() const { return pool_.has_value(); }
    bool lies_in(const Region& region) const { return region.contains(pool_->base_offset, pool_->blocks * block_bytes_); }
    std::optional<u64> index_of(u64 handle) const {
        return handle - base_handle_ < entries_ ? std::optional(handle - base_handle_) : std::nullopt;
    }
    Entry entry(u64 index) const;
    // A request for this handle will come soon: have its entry at hand.
    void expect(u64 handle) const {
        const auto index = index_of(handle);
        if (!index) return;
        __builtin_prefetch(table_ + 16 * *index);
        __builtin_prefetch(&readers_[*index], 1);
    }

    // --- readers, any thread ------------------------------------------------------------------------------------------------
    // One more reader of `index`, if its entry still has these flags and this generation.
    bool begin_read(u64 index, const Entry& seen);
    void end_read(u64 index) { readers_[index].fetch_sub(1); }
    // The software target's own readers: it looks at the entry again afterwards.
    void hold(u64 index);
    u32 readers(u64 index) const { return index < entries_ ? readers_[index].load() & ~kClaim : 0; }

    // --- ring, any thread -----------------------------------------------------------------------------------------------------
    std::optional<u64> allocate();
    void give_back(u64 block_offset);

    // --- blocks of a session that this side serves; `grant` is that session's --------------------------------------------------
    // Nothing has happened where these return false or nothing.
    std::optional<u64> take(const StoreGrant& grant, u64 index);  // a block for ALLOC_STORE, and the entry reserved for it
    // The data never came whole: at most the first `written` octets of the block were written.
    void untake(const StoreGrant& grant, u64 index, u64 block_offset, u32 written);
    void bind(const StoreGrant& grant, u64 index, u64 block_offset, u32 length, bool seal);
    void update(u64 index, u32 length, bool seal);  // data was stored into a bound block
    bool free(const StoreGrant& grant, u64 index);
    bool is_idle(u64 index) const;
    bool clears_at_length() const;  // `free` would take too long: it is left to the software target
    u8* block(u64 block_offset) { return pool_->memory + (block_offset - pool_->base_offset); }

    // --- for the keyed store (keyed_store.hpp), under its lock; entries are its own, or a session's that hands them over ----------
    u64 handle_of(u64 index) const { return base_handle_ + index; }
    u16 generation(u64 index) const { return pool_->generations[index]; }
    // Mark the entries [base, base + count) that are read, from now on; before any session is served.
    void watch(u64 base, u64 count);
    std::atomic<u64>& recent(u64 word) { return recent_[word]; }  // one bit a watched entry
    void touch(u64 index);
    // Turn new readers away; false if there are some. Nothing may wait while it is held.
    bool claim(u64 index);
    void drop_claim(u64 index) { readers_[index].fetch_sub(kClaim); }
    // Claimed entries: the session's block goes to the store, or back to the ring (and the claim is dropped).
    void hand_over(const StoreGrant& grant, u64 index);
    void free_claimed(const StoreGrant& grant, u64 index);
    void name(u64 index, u64 owner, u64 block_offset, u32 length);  // valid and sealed
    void clear(u64 index);
    void skip(u64 index);                                      // as if it had been bound and cleared
    void keep(u64 index, u64 block_offset, bool is_draining);  // it names nothing, and a block is still the store's
    void let_idle(u64 index);
    void release(u64 block_offset) { release(block_offset, block_bytes_); }

  private:
    static constexpr u32 kClaim = 0x8000'0000;

    u32 load_state(u64 index) const;  // Flags and Generation in one 32-bit load
    void publish(u64 index, u16 flags, u16 generation);
    void set_length(u64 index, u32 length);
    u8& block_state(u64 block_offset) { return pool_->block_states[(block_offset - pool_->base_offset) / block_bytes_]; }
    void return_block(const StoreGrant& grant, u64 block_offset, u32 written);
    void release(u64 block_offset, u32 written);
    void bind(u64 owner, u64 index, u64 block_offset, u32 length, bool seal);
    u64 advance(u64& counter);  // with ring_mutex_ held; returns the ticket

    u8* const table_;
    const u64 entries_, base_handle_;
    const u32 block_bytes_;
    const std::optional<PoolState> pool_;
    std::vector<std::atomic<u32>> readers_;
    u64 watched_base_ = 0, watched_count_ = 0;
    std::vector<std::atomic<u64>> recent_;
    std::atomic<bool> stopped_{false};
    std::mutex ring_mutex_;
};

}  // namespace kbtp

// The RAM tier of the keyed store (docs/store-protocol.md): which value is in which block.
//
// A value has a number, and number i has entry `base + i` of the block table as its handle for ever; there are as many as blocks. States:
//
//     free --adopt--> resident --evict--> free
//     free --reserve--> promoting --promoted--> resident        (read from disk into its block)
//     resident, promoting --remove, failed--> leaving --no reader, no I/O left--> free
//
// 1. A value can be found (`index_`) while it is resident or promoting, and its table entry is valid exactly while it is resident. What
//    leaves can't be found any more from the moment it leaves.
// 2. A block goes back to the ring once the entry is cleared, no reader is counted, and no disk I/O uses it.
// 3. used <= limit: the blocks that the store holds, and what is left of the pool when every session has its quota. So no session ever
//    misses a block that it was promised: whoever adopts or reserves makes room first.
// 4. CLOCK takes what is resident and not held. Held is what is dirty, being flushed, or pinned.
// 5. Each disk has a lane of its own (`lane_of`), so that one that hangs holds up nothing that another could take: neither its flushers nor
//    its readers, and what waits for one disk leaves room for the others.
// 6. The first writer of a key wins, and a key that is being removed (`fences_`) is neither flushed nor promoted until that has ended.
//
// `mutex_` guards everything; any thread may call. The entries of the store's range are written under it alone; entries of a session that
// adopts are that session's (executor.hpp), so whoever serves the session calls.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <queue>
#include <unordered_map>

#include "executor.hpp"
#include "keyed_index.hpp"

namespace kbtp {

// Statuses of the protocol that this decides (protocol/constants.py), and three that never leave the target.
namespace status {
inline constexpr u16 ok = 0, malformed = 1, not_permitted = 3, not_bound = 4, already_bound = 5, not_sealed = 6, stale = 8, no_space = 10,
                     busy = 14;
inline constexpr u16 undecided = 0xffff;
inline constexpr u16 is_read = 0xfffe;        // the block is being read: try again
inline constexpr u16 is_committing = 0xfffd;  // the id's first writer waits for the disk: try again
}  // namespace status

enum class Tier : u8 { absent = 0, ram = 1, disk = 2, promoting = 3 };

namespace lookup_flag {
inline constexpr u32 promote = 1, prefix = 2, touch = 4, known = 7;
}
namespace publish_flag {
inline constexpr u32 durable = 1, pin = 2, known = 3;
}

inline constexpr u64 kNoHandle = ~u64{0}, kAllLanes = ~u64{0};

// These mirror the arrays of store/ram.py.
struct LookupItem {
    u64 handle;
    u32 length;
    u16 generation;
    Tier tier;
    u8 flags;  // 1 dirty, 2 pinned; 0x80 being removed from disk
};
static_assert(sizeof(LookupItem) == 16);

struct PublishItem {
    std::array<u8, 16> id;
    u64 handle;
    u32 crc;
    u16 generation;
    u16 flags;

    // Its writer can write to it later: copy the block, and leave the entry to the caller.
    bool is_copied() const { return flags & 1; }
    // The caller has asked the disk, which has the id.
    bool is_on_disk() const { return flags & 2; }
};
static_assert(sizeof(PublishItem) == 32);

struct PublishResult {
    u64 handle;
    u16 status, generation;
    u32 is_committing;  // the writer waits for the disk: `take_settled` has the result
};
static_assert(sizeof(PublishResult) == 16);

// What one value is on its way to or from the disk.
struct DiskItem {
    ValueKey key;
    u64 space, address, handle;
    u32 number, length, crc, expiry_s;
    u16 generation, status;
    u32 has_left;
};
static_assert(sizeof(DiskItem) == 72);

struct ListItem {
    std::array<u8, 16> id;
    u32 length, ttl_s;
    u8 tier, flags;
    u16 reserved;
};
static_assert(sizeof(ListItem) == 28);

struct Settled {
    u64 index;  // of the table entry
    u16 generation, status;
    u32 is_promotion;
};
static_assert(sizeof(Settled) == 16);

struct KeyedLevels {
    u64 used, limit, resident, promoting, leaving, dirty, pinned;
};

struct NamedKeyedLevel {
    const char* name;
    u64 KeyedLevels::* level;
};
inline constexpr NamedKeyedLevel kKeyedLevels[] = {
    {"used", &KeyedLevels::used},           {"limit", &KeyedLevels::limit},     {"resident", &KeyedLevels::resident},
    {"promoting", &KeyedLevels::promoting}, {"leaving", &KeyedLevels::leaving}, {"dirty", &KeyedLevels::dirty},
    {"pinned", &KeyedLevels::pinned},
};

struct KeyedCounters {
    u64 hits, misses, published, lost_races, refused_full, refused_dirty, refused_quota, evicted, removed, expired, flushed, flush_failed,
        promoted, promotion_failed, overruled;
};
struct NamedKeyedCounter {
    const char* name;
    u64 KeyedCounters::* counter;
};
inline constexpr NamedKeyedCounter kKeyedCounters[] = {
    {"hits", &KeyedCounters::hits},
    {"misses", &KeyedCounters::misses},
    {"published", &KeyedCounters::published},
    {"lost_races", &KeyedCounters::lost_races},
    {"refused_full", &KeyedCounters::refused_full},
    {"refused_dirty", &KeyedCounters::refused_dirty},
    {"refused_quota", &KeyedCounters::refused_quota},
    {"evicted", &KeyedCounters::evicted},
    {"removed", &KeyedCounters::removed},
    {"expired", &KeyedCounters::expired},
    {"flushed", &KeyedCounters::flushed},
    {"flush_failed", &KeyedCounters::flush_failed},
    {"promoted", &KeyedCounters::promoted},
    {"promotion_failed", &KeyedCounters::promotion_failed},
    {"overruled", &KeyedCounters::overruled},
};

// Where values may be besides: what the disk tier's index knows. Called under the store's lock, so it is quick and calls nothing back.
class BackingIndex {
  public:
    virtual ~BackingIndex() = default;
    virtual u32 length_of(const ValueKey& key) = 0;  // 0: absent
};

struct KeyedOptions {
    u64 base_entry, capacity;  // the table entries of the store, as many as blocks
    u64 owner;                 // of its entries, in the table's array of owners
    u64 dirty_limit;           // blocks that may wait for the disk; 0: there is no disk
    bool writes_around;        // to disk, and not kept in RAM
    bool acks_on_disk;         // every PUBLISH is DURABLE
    u32 default_lease_ms, longest_lease_ms;
};

// What a session's PUBLISHes belong to.
struct Space {
    u64 tenant = 0, id = 0;
    u32 ttl_s = 0;
};

class KeyedStore {
  public:
    KeyedStore(std::shared_ptr<Executor> executor, KeyedOptions options);
    KeyedStore(const KeyedStore&) = delete;
    KeyedStore& operator=(const KeyedStore&) = delete;

    bool has_disk() const { return options_.dirty_limit > 0; }
    void set_backing(std::shared_ptr<BackingIndex> backing);
    // As many lanes as there are disks; `points` in order, and the lane that each point of the ring belongs to. Before anything is kept.
    void set_lanes(std::vector<u32> points, std::vector<u8> owners, u64 count);
    bool has_backing() const { return backing_ != nullptr; }
    void set_limit_of_tenant(u64 tenant, u64 bytes);  // ~0: none
    void set_default_limit(u64 bytes);
    // The clock stands still at this time of day from now on; for tests.
    void set_now(u64 now_ms) { manual_now_ms_.store(now_ms); }
    u64 now_ms() const;

    // Let sessions have all but `blocks`; returns how many the store may have now, which is more if it can't let go of enough.
    u64 set_limit(u64 blocks);

    // --- messages ---------------------------------------------------------------------------------------------------------------
    // Returns how many of the ids were answered: all, or with PREFIX up to the first that is absent.
    u64 lookup(u64 tenant, std::span<const u8> ids, u32 flags, LookupItem* out);
    // Count what was found, once it is the answer.
    void note_lookup(std::span<const LookupItem> found);
    // Decide the items whose result is undecided; returns how many still are (`is_read`, `is_committing`).
    u64 publish(const StoreGrant& grant, const Space& space, u64 tenant, u32 flags, std::span<const PublishItem> items, PublishResult* out);
    // As `publish`, all items or, with nothing changed, none: false if one can't be decided at once.
    bool publish_now(const StoreGrant& grant, const Space& space, u64 tenant, u32 flags, std::span<const PublishItem> items,
                     PublishResult* out);
    // Whether a PUBLISH may wait for its stores without the software target: its answer does not wait for the disk.
    bool may_park(u64 tenant, u32 flags) const;
    // Hide these ids, and with `fence` keep them off the disk until `unfence`. `was_there` is 2 for what is being written to disk just now.
    u64 remove(u64 tenant, std::span<const u8> ids, bool fence, u8* was_there);
    void unfence(u64 tenant, std::span<const u8> ids);
    // Nothing: whoever's it is. `tenants` is sorted.
    u16 pin(u64 handle, u16 generation, bool wanted, u32 lease_ms, const std::vector<u64>* tenants);
    bool has_entry(u64 index) const { return index - options_.base_entry < options_.capacity; }
    // Whose value the entry has, or is about to have; nothing if it has none.
    std::optional<u64> tenant_of(u64 index) const;
    // As `tenant_of` for whoever counts as a reader of the entry and saw it valid after that: its value keeps its number until the count is
    // zero, so its key does not change, and was written before the entry became valid. Without the lock.
    u64 tenant_of_read(u64 index) const { return values_[index - options_.base_entry].key.tenant; }
    // One step over the values from `cursor` on; returns where to go on, 0 at the end.
    u64 remove_space(u64 tenant, u64 space, u64 cursor, u64 lane, u64& removed);  // of one lane, or of kAllLanes
    u64 list(u64 tenant, u64 space, u64 cursor, std::span<ListItem> out, u64& count);
    // Whether the entry is a promoting value's that has this generation once it is read; 0 accepts any.
    bool will_have(u64 index, u16 generation) const;
    u64 memory_bytes() const;

    // --- upkeep -------------------------------------------------------------------------------------------------------------------
    // Give blocks back whose readers have ended, let leases and values end whose time is over. How many blocks still have readers.
    u64 tick();

    // --- disk, keyed_store_disk.cpp ---------------------------------------------------------------------------------------------------
    // Values to write to the lane's disk, oldest first, held until `flushed`. Waits up to `wait_s` for the first one.
    u64 take_dirty(u64 lane, std::span<DiskItem> out, double wait_s);
    // `status` of each: OK, ALREADY_BOUND where the disk had the key before, or why it failed. Afterwards `has_left` is 1 where
    // the value was removed meanwhile: the caller takes it off the disk and then calls `unfence`.
    void flushed(std::span<DiskItem> items);
    // Blocks for values that are on disk: handle, generation and address, or a status.
    void reserve(std::span<DiskItem> items);
    void promoted(std::span<DiskItem> items);  // by `status`
    // Values that were read from disk, from `cursor` on; returns where to go on, 0 at the end. And let go of some.
    u64 list_read(u64 lane, u64 cursor, std::span<DiskItem> out, u64& count) const;
    void drop_read(std::span<const DiskItem> items);
    void wake_flushers();
    // What has been decided since the last call for those who wait: commits of DURABLE publishes, and promotions.
    std::vector<Settled> take_settled();
    u64 promoting_count() const;

    KeyedCounters counters() const;
    KeyedLevels levels() const;
    u64 bytes_of_tenant(u64 tenant) const;
    std::vector<std::pair<u64, u64>> bytes_of_tenants() const;
    // Other stores may hold the same ids: whoever removes one asks all of them, so no executor does it.
    void set_siblings(bool has_some) { has_siblings_.store(has_some); }
    bool has_siblings() const { return has_siblings_.load(); }
    void check_integrity() const;  // throws std::logic_error

  private:
    enum class State : u8 { free, resident, promoting, leaving };
    // Waits for the disk; disk I/O uses the block; a writer waits for the disk; not kept once it is there; was read from there.
    static constexpr u8 kDirty = 1, kBusy = 2, kCommitting = 4, kThrough = 8, kRead = 16;
    struct Value {
        ValueKey key;
        u64 space = 0, block_offset = 0, pinned_until_ms = 0;
        u32 length = 0, crc = 0, expiry_s = 0;
        u16 pins = 0;
        State state = State::free;
        u8 flags = 0, lane = 0;
    };
    struct KeyOf {
        const KeyedStore* store;
        const ValueKey& operator()(u32 number) const { return store->values_[number].key; }
    };
    struct Deadline {
        u64 at;
        u32 number;
        bool operator>(const Deadline& other) const { return at > other.at; }
    };
    using Deadlines = std::priority_queue<Deadline, std::vector<Deadline>, std::greater<>>;
    // A disk: what waits for it.
    struct Lane {
        std::queue<u32> dirty;
        std::condition_variable has_dirty;
        u64 dirty_count = 0, reading_count = 0;
    };
    struct Usage {
        u64 bytes = 0, limit = 0;
        bool has_limit = false;
    };

    // All of these with mutex_ held.
    u64 index_of(u32 number) const { return options_.base_entry + number; }
    u64 handle_of(u32 number) const { return executor_->handle_of(index_of(number)); }
    std::optional<u32> number_of(u64 index) const {
        return index - options_.base_entry < options_.capacity ? std::optional(static_cast<u32>(index - options_.base_entry))
                                                               : std::nullopt;
    }
    PublishResult decide(const StoreGrant& grant, const Space& space, u64 tenant, u32 flags, const PublishItem& item, bool is_claimed);
    PublishResult lost(const StoreGrant& grant, u64 index, u32 winner, const PublishItem& item, bool is_claimed);
    u16 check(const StoreGrant& grant, const PublishItem& item, u64& index, Entry& entry) const;
    u16 make_room(const ValueKey& key, u32 length);
    u8 lane_of(const ValueKey& key) const;
    void tell_flushers();
    u64 lane_share(u64 blocks) const { return lanes_.size() > 1 ? blocks * 3 / 5 : blocks; }  // so that no lane has all
    bool evict();
    void free_resident(u32 number);
    u32 take_number(const ValueKey& key);
    void leave(u32 number);
    bool finish(u32 number);
    void update_held(u32 number);
    bool expired(const Value& value, u64 now_s) const { return value.expiry_s != 0 && value.expiry_s <= now_s; }
    u32 find(const ValueKey& key);
    void note(u32 number, const Space& space, u64 tenant, u32 flags);
    void pin_until(u32 number, u64 until_ms);
    void end_leases(u64 now_ms);
    void end_values(u64 now_ms);
    // A heap has what is due, and what was due of values that have gone since: it is made anew before that is more than the values are.
    void push(Deadlines& heap, Deadline deadline);
    Deadline deadline_of(const Deadlines& heap, u32 number) const;  // at 0: none
    void charge(u64 tenant, u64 bytes) { tenants_[tenant].bytes += bytes; }
    void discharge(u64 tenant, u64 bytes);
    u64 bytes_of(u64 tenant) const;
    u64 tick_locked();
    u64 limit_of(u64 tenant) const;
    bool waits_for_disk(u64 tenant, u32 flags) const;  // a PUBLISH, with its answer
    u8 flags_of(const Value& value) const;
    bool bit(const std::vector<u64>& bits, u32 number) const { return bits[number / 64] >> number % 64 & 1; }
    static void set_bit(std::vector<u64>& bits, u32 number, bool on);
    void set_state(u32 number, State state);
    bool is_fenced(const ValueKey& key) const { return fences_.contains(key); }
    void drop_fence(const ValueKey& key);

    const std::shared_ptr<Executor> executor_;
    const KeyedOptions options_;
    std::shared_ptr<BackingIndex> backing_;
    std::atomic<u64> manual_now_ms_{0};
    std::atomic<bool> has_siblings_{false};

    mutable std::mutex mutex_;
    std::vector<Value> values_;
    KeyedIndex<KeyOf> index_;
    std::vector<u32> free_;
    std::vector<u64> resident_, held_;  // one bit a value
    u64 hand_ = 0;                      // the value that CLOCK looks at next
    u64 used_ = 0, limit_ = 0, resident_count_ = 0, promoting_count_ = 0, held_count_ = 0, dirty_count_ = 0;
    u64 pinned_count_ = 0;
    std::vector<u32> leaving_;
    std::deque<Lane> lanes_;   // one a disk; conditions don't move
    std::vector<u32> points_;  // of the ring that gives each key its lane …
    std::vector<u8> owners_;   // … and whose they are
    std::unordered_map<ValueKey, u32, ValueKeyHash> fences_;
    std::unordered_map<u64, Usage> tenants_;
    u64 default_limit_ = ~u64{0};
    Deadlines leases_, lifetimes_;
    bool is_waking_ = false;
    std::vector<Settled> settled_;
    KeyedCounters counters_{};
};

}  // namespace kbtp

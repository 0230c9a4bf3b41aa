// The slab engine of one disk: values of up to one extent each, in slots of exactly their size, found by an index in memory.
//
// slab_disk.hpp says why a record is proof of its payload; value.hpp has a value's states. The rest:
// 1. The first writer of a key wins. Who puts a key that is being written waits for that write, and gets its outcome.
// 2. Whoever hides a value sees to it that its record is cleared, once nobody reads or writes it; only then is its slot free.
// 3. `mutex_` guards the index and the extents, and is never held over I/O.
//
// Any thread may call anything; nothing here knows Python.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>

#include "../types.hpp"
#include "extents.hpp"
#include "slab_disk.hpp"
#include "tenants.hpp"
#include "value_table.hpp"

namespace kbtp::store {

struct PutBatch {
    const u8* keys;  // kKeyOctets each
    std::span<const u64> addresses;
    const u32 *lengths, *crcs;
    const u64* namespaces;
    const u32* expiries;
    u8* outcomes;
};

struct GetBatch {
    const u8* keys;
    std::span<const u64> addresses;
    const u32 *capacities, *offsets;
    u8* outcomes;
    u32 *stored, *copied, *crcs;
};

struct Listing {
    std::vector<u8> keys;
    std::vector<u32> lengths, expiries;
    u64 cursor = 0;  // where to go on; 0: that was all
};

// What is only counted; slab_stats.cpp has their names.
struct SlabCounters {
    u64 puts = 0, put_bytes = 0, exists = 0, no_space = 0, failed_puts = 0;
    u64 hits = 0, misses = 0, hit_bytes = 0, checksum_errors = 0, read_errors = 0;
    u64 evicted = 0, drained_extents = 0, reclaims = 0, space_retries = 0;
    u64 removed = 0, expired = 0, records_dropped = 0, recovered = 0;
};

class Slab {
  public:
    // Throws StoreError.
    Slab(const SlabOptions& options, std::shared_ptr<TenantLedger> ledger);
    ~Slab();
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    // Returns when all that are `ok` are durable.
    void put(const PutBatch& batch);
    void get(const GetBatch& batch);
    void lookup(const u8* keys, std::span<u32> lengths);  // 0: absent
    // Hidden at once; returns when that is durable and nothing is in flight on them any more.
    void remove(const u8* keys, std::span<u8> were_there);
    u64 remove_namespace(u64 tenant, u64 name_space);
    u64 expire(u32 now);
    Listing list(std::optional<u64> tenant, std::optional<u64> name_space, u64 cursor, u64 most);
    std::vector<std::pair<std::string, u64>> stats();
    std::string why_degraded() const { return disk_.why(); }
    u64 fault_visits(FaultPoint point) const { return disk_.faults().visits(point); }
    int sync();
    // In order; what comes later is a miss or an io_error. False if the disk did not take it.
    bool close();
    void check_integrity();

  private:
    // A write in flight; whoever put the same key waits for it.
    struct Flight {
        bool is_done = false;
        Outcome outcome = Outcome::io_error;
    };
    struct Leader {
        std::size_t index;
        u32 number;
        std::shared_ptr<Flight> flight;
        Outcome outcome = Outcome::ok;
    };
    struct Follower {
        std::size_t index;
        std::shared_ptr<Flight> flight;
    };
    struct Admission {
        std::vector<Leader> leaders;
        std::vector<Follower> followers;
        std::vector<std::size_t> starved;
    };
    struct Reading {
        std::size_t index;
        u32 number;
    };

    void recover();
    bool recover_one(u64 at, const u8* octets);

    // with mutex_
    void admit(const PutBatch& batch, std::size_t index, u32 now, Admission& into);
    bool can_serve(u32 number, u32 now) const;
    void hide(u32 number);  // whoever calls it clears it …
    void drop(u32 number);  // … or leaves that to the housekeeper
    void unpin(u32 number);
    void finish(Leader& leader);
    std::vector<u32> choose_victims(u32 units, u64 count);
    u32 choose_drain(u32 units);
    void watch_level(u32 units);

    // without
    void put_window(const PutBatch& batch, std::size_t first, std::size_t last);
    void write_out(const PutBatch& batch, std::vector<Leader>& leaders);
    void write_payloads(const PutBatch& batch, std::vector<Leader>& leaders);
    void write_records(std::vector<Leader>& leaders);
    std::vector<PlacedRecord> records_of(const std::vector<Leader>& leaders);
    void make_room(u32 units, u64 count);
    bool drain(u32 extent, std::unique_lock<std::mutex>& lock);
    bool make_space_on_filesystem();
    void has_space_on_filesystem();
    int clear(const std::vector<u32>& numbers);
    void wait_and_clear(const std::vector<u32>& numbers);
    template <class Which>
    std::vector<u32> hide_all(Which&& which);
    void keep_house();

    const std::shared_ptr<TenantLedger> ledger_;
    SlabDisk disk_;
    std::shared_mutex life_;  // shared by each operation, held alone to close
    bool is_closed_ = false;

    std::mutex room_;   // held by the one thread that evicts, so that no two do for the same need; before mutex_
    std::mutex mutex_;  // guards all below
    std::condition_variable flight_ended_, unpinned_, house_work_;
    ValueTable values_;
    Extents extents_;
    std::unordered_map<u32, std::shared_ptr<Flight>> flights_;  // by value
    std::vector<u32> to_clear_;                                 // hidden, without pins: the housekeeper's
    std::set<u32> low_;                                         // slot sizes that are nearly full
    u64 next_sequence_ = 1, committed_bytes_ = 0, committed_slot_bytes_ = 0;
    SlabCounters counters_;
    TimePoint space_retry_at_;  // for a full filesystem nothing is evicted before
    bool is_ending_ = false;

    std::thread housekeeper_;
};

}  // namespace kbtp::store

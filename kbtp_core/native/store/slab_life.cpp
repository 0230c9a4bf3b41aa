// A slab's start, which rebuilds the index from the table alone, and its end; and what it can say of itself.
#include <cerrno>
#include <utility>

#include "check.hpp"
#include "slab.hpp"
#include "store_error.hpp"

namespace kbtp::store {

Slab::Slab(const SlabOptions& options, std::shared_ptr<TenantLedger> ledger)
    : ledger_(std::move(ledger)), disk_(options), extents_(static_cast<u32>(disk_.geometry().extent_count), disk_.geometry().extent_bytes) {
    recover();
    housekeeper_ = std::thread(&Slab::keep_house, this);
}

Slab::~Slab() { close(); }

// Sees alone, so without the mutex.
void Slab::recover() {
    static constexpr u8 kZeros[kRecord] = {};
    std::vector<u64> rejected;
    next_sequence_ = disk_.superblock().sequence;
    disk_.scan([&](u64 first, const u8* octets, std::size_t size) {
        for (std::size_t at = 0; at < size; at += kRecord) {
            if (std::memcmp(octets + at, kZeros, kRecord) == 0) continue;
            if (!recover_one(first + at, octets + at)) rejected.push_back(first + at);
        }
    });
    extents_.end_restore();
    for (const u32 number : to_clear_) {  // an older record of a key that has a newer one
        rejected.push_back(disk_.geometry().record_at(values_[number].place));
        extents_.give_back(values_[number].place);
        values_.forget(number);
    }
    to_clear_.clear();
    counters_.records_dropped = rejected.size();
    counters_.recovered = values_.found_count();
    disk_.begin_epoch();
    if (disk_.clear(std::move(rejected)) != 0) throw StoreError(disk_.why());
}

// False if these octets are no record, or an older one of their key.
bool Slab::recover_one(u64 at, const u8* octets) {
    auto read = read_record(octets, disk_.id(), at);
    if (!read) return false;
    const u64 part = disk_.geometry().part_bytes();
    Value& value = read->value;
    value.place = {static_cast<u32>(at / part), static_cast<u32>(at % part / kRecord)};
    value.state = State::committed;
    next_sequence_ = std::max(next_sequence_, value.sequence + 1);
    const u32 other = values_.find(value.key);
    if (other != kNone && values_[other].sequence > value.sequence) return false;
    if (!extents_.restore(value.place, read->units)) return false;
    if (other != kNone) {
        hide(other);
        to_clear_.push_back(other);
    }
    ledger_->count(value.key.tenant, value.length);
    committed_bytes_ += value.length;
    committed_slot_bytes_ += u64{read->units} * kUnit;
    extents_.own(value.place, values_.add(value));
    return true;
}

int Slab::sync() {
    const std::shared_lock life(life_);
    if (is_closed_) return EBADF;
    const int error = disk_.sync_payloads();
    return error ? error : disk_.sync_table(FaultPoint::record_sync);
}

bool Slab::close() {
    const std::unique_lock life(life_);
    if (is_closed_) return true;
    {
        const std::lock_guard guard(mutex_);
        is_closed_ = is_ending_ = true;
        house_work_.notify_all();
    }
    housekeeper_.join();
    for (u32 number = 0; number < values_.end(); ++number)  // no octets of a closed store count for a tenant
        if (values_[number].state == State::committed) ledger_->release(values_[number].key.tenant, values_[number].length);
    bool is_clean = !disk_.is_degraded();
    if (is_clean && !to_clear_.empty()) is_clean = clear(std::exchange(to_clear_, {})) == 0;
    if (is_clean) is_clean = disk_.sync_payloads() == 0 && disk_.sync_table(FaultPoint::record_sync) == 0;
    const bool has_ended = disk_.end_epoch(next_sequence_) == 0;
    return is_clean && has_ended;
}

std::vector<std::pair<std::string, u64>> Slab::stats() {
    const std::lock_guard guard(mutex_);
    const SlabCounters& c = counters_;
    const Geometry& g = disk_.geometry();
    std::vector<std::pair<std::string, u64>> told{
        {"puts", c.puts},
        {"put_bytes", c.put_bytes},
        {"puts_of_known_keys", c.exists},
        {"puts_without_space", c.no_space},
        {"failed_puts", c.failed_puts},
        {"hits", c.hits},
        {"misses", c.misses},
        {"hit_bytes", c.hit_bytes},
        {"checksum_errors", c.checksum_errors},
        {"read_errors", c.read_errors},
        {"evicted_values", c.evicted},
        {"drained_extents", c.drained_extents},
        {"reclaims", c.reclaims},
        {"space_retries", c.space_retries},
        {"removed_values", c.removed},
        {"expired_values", c.expired},
        {"records_dropped", c.records_dropped},
        {"recovered_values", c.recovered},
        {"values", values_.found_count()},
        {"committed_bytes", committed_bytes_},
        {"slot_bytes", committed_slot_bytes_},
        {"capacity_bytes", g.extent_bytes * g.extent_count},
        {"extents", extents_.count()},
        {"free_extents", extents_.free_extents()},
        {"slot_sizes", extents_.classes().size()},
        {"index_bytes", values_.memory_bytes() + extents_.memory_bytes()},
        {"is_direct", disk_.is_direct()},
        {"has_io_uring", disk_.has_rings()},
        {"is_allocated", disk_.is_allocated()},
        {"is_degraded", disk_.is_degraded()},
        {"started_clean", disk_.superblock().is_clean},
        {"epoch", disk_.superblock().epoch + 1},
    };
    for (std::size_t kind = 0; kind < std::size(kDiskErrorNames); ++kind)
        told.emplace_back(kDiskErrorNames[kind], disk_.errors(static_cast<DiskErrorKind>(kind)));
    return told;
}

// Every slot is free or belongs to a value, and the sums are those of the values.
void Slab::check_integrity() {
    const std::lock_guard guard(mutex_);
    values_.check_integrity();
    extents_.check_integrity();
    u64 slots = 0, free = 0, used = 0, bytes = 0;
    for (const auto& [units, c] : extents_.classes()) slots += c.slots, free += c.free;
    for (u32 number = 0; number < values_.end(); ++number) {
        const Value& value = values_[number];
        used += value.state != State::free;
        if (value.state == State::committed) bytes += value.length;
    }
    KBTP_CHECK(used == slots - free);
    KBTP_CHECK(bytes == committed_bytes_);
}

}  // namespace kbtp::store

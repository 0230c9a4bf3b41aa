// Writing values: admitted under the mutex, written and synced without it, committed under it again.
#include <algorithm>
#include <cerrno>
#include <ctime>
#include <map>

#include "slab.hpp"

namespace kbtp::store {
namespace {

constexpr int kEvictionsMost = 4;  // for one batch; other batches may take what was made for it
constexpr std::size_t kWindowItems = std::size_t{1} << 14;

void say(const PutBatch& batch, std::size_t index, Outcome outcome) { batch.outcomes[index] = static_cast<u8>(outcome); }

}  // namespace

void Slab::put(const PutBatch& batch) {
    const std::shared_lock life(life_);
    // A batch is cut so that no part of it needs more than an eighth of the disk at once.
    const u64 window_bytes = disk_.geometry().extent_bytes * disk_.geometry().extent_count / 8;
    for (std::size_t first = 0; first < batch.addresses.size();) {
        std::size_t last = first;
        u64 bytes = 0;
        while (last < batch.addresses.size() && last - first < kWindowItems && (bytes == 0 || bytes + batch.lengths[last] <= window_bytes))
            bytes += batch.lengths[last++];
        put_window(batch, first, last);
        first = last;
    }
}

void Slab::put_window(const PutBatch& batch, std::size_t first, std::size_t last) {
    Admission admission;
    std::vector<std::size_t> todo(last - first);
    for (std::size_t i = first; i < last; ++i) todo[i - first] = i;
    for (int round = 0; round <= kEvictionsMost; ++round) {
        admission.starved.clear();
        {
            const std::lock_guard guard(mutex_);
            for (const std::size_t index : todo) admit(batch, index, static_cast<u32>(std::time(nullptr)), admission);
        }
        if (admission.starved.empty()) break;
        todo = admission.starved;
        std::map<u32, u64> needed;
        for (const std::size_t index : todo) ++needed[units_of(batch.lengths[index])];
        if (round < kEvictionsMost)
            for (const auto& [units, count] : needed) make_room(units, count);
    }
    write_out(batch, admission.leaders);
    std::unique_lock lock(mutex_);
    counters_.puts += last - first;
    counters_.no_space += admission.starved.size();
    for (const std::size_t index : admission.starved) say(batch, index, Outcome::no_space);
    for (const Leader& leader : admission.leaders) say(batch, leader.index, leader.outcome);
    for (const Follower& follower : admission.followers) {
        flight_ended_.wait(lock, [&] { return follower.flight->is_done; });  // its leader waits for nobody
        say(batch, follower.index, follower.flight->outcome);
    }
}

void Slab::admit(const PutBatch& batch, std::size_t index, u32 now, Admission& into) {
    const u32 length = batch.lengths[index], units = units_of(length);
    if (is_closed_ || disk_.is_degraded()) return say(batch, index, Outcome::io_error);
    if (length == 0 || length > disk_.geometry().extent_bytes) return say(batch, index, Outcome::length);
    const Key key = key_at(batch.keys + index * kKeyOctets);
    const u32 found = values_.find(key);
    if (found != kNone && values_[found].state == State::writing) {
        into.followers.push_back({index, flights_.at(found)});
        return;
    }
    if (can_serve(found, now)) {
        ++counters_.exists;
        return say(batch, index, Outcome::exists);
    }
    if (found != kNone) drop(found);  // its time is over
    if (!ledger_->charge(key.tenant, length)) return say(batch, index, Outcome::quota);
    const auto place = extents_.take(units);
    watch_level(units);
    if (!place) {
        ledger_->release(key.tenant, length);
        into.starved.push_back(index);
        return;
    }
    Value value{key, batch.namespaces[index], next_sequence_++, length, batch.crcs[index], batch.expiries[index], *place};
    value.pins = 1;
    value.state = State::writing;
    const u32 number = values_.add(value);
    extents_.own(*place, number);
    extents_.pin(place->extent);
    const auto flight = std::make_shared<Flight>();
    flights_.emplace(number, flight);
    into.leaders.push_back({index, number, flight});
}

void Slab::write_out(const PutBatch& batch, std::vector<Leader>& leaders) {
    if (leaders.empty()) return;
    write_payloads(batch, leaders);
    if (disk_.sync_payloads() == 0) write_records(leaders);
    const int error = disk_.sync_table(FaultPoint::record_sync);
    const std::lock_guard guard(mutex_);
    for (Leader& leader : leaders) {
        if (error && leader.outcome == Outcome::ok) leader.outcome = Outcome::io_error;
        finish(leader);
    }
    flight_ended_.notify_all();
}

// Those that have no error yet, and after a full disk once more.
void Slab::write_payloads(const PutBatch& batch, std::vector<Leader>& leaders) {
    std::vector<Leader*> todo;
    for (Leader& leader : leaders) todo.push_back(&leader);
    for (const bool is_retry : {false, true}) {
        const auto transfers = std::make_shared<std::vector<Transfer>>();
        {
            const std::lock_guard guard(mutex_);
            for (const Leader* leader : todo) {
                const Value& value = values_[leader->number];
                Transfer t;
                t.payload = disk_.geometry().payload_at(value.place, extents_.units(value.place.extent));
                t.address = reinterpret_cast<u8*>(batch.addresses[leader->index]);
                t.length = value.length;
                transfers->push_back(t);
            }
        }
        const bool is_written = disk_.write(transfers) == 0;
        std::vector<Leader*> full;
        for (std::size_t k = 0; k < todo.size(); ++k) {
            todo[k]->outcome = is_written ? Outcome::ok : Outcome::io_error;
            if (is_written && (*transfers)[k].error == ENOSPC) full.push_back(todo[k]);
        }
        for (Leader* leader : full) leader->outcome = Outcome::no_space;
        if (full.empty() && is_retry) has_space_on_filesystem();
        if (full.empty() || is_retry || !make_space_on_filesystem()) return;
        todo = std::move(full);
    }
}

std::vector<PlacedRecord> Slab::records_of(const std::vector<Leader>& leaders) {
    std::vector<PlacedRecord> records;
    const std::lock_guard guard(mutex_);
    for (const Leader& leader : leaders) {
        const Value& value = values_[leader.number];
        if (leader.outcome != Outcome::ok || value.state != State::writing) continue;  // removed meanwhile: no record
        const u64 at = disk_.geometry().record_at(value.place);
        records.push_back({at, write_record(value, extents_.units(value.place.extent), disk_.id(), at)});
    }
    return records;
}

void Slab::write_records(std::vector<Leader>& leaders) {
    int error = disk_.write_records(records_of(leaders));
    if (error == ENOSPC && make_space_on_filesystem()) {
        error = disk_.write_records(records_of(leaders));
        if (error == 0) has_space_on_filesystem();
    }
    if (error == 0) return;
    for (Leader& leader : leaders)
        if (leader.outcome == Outcome::ok) leader.outcome = error == ENOSPC ? Outcome::no_space : Outcome::io_error;
}

void Slab::finish(Leader& leader) {
    Value& value = values_[leader.number];
    if (value.state == State::hidden) {
        leader.outcome = Outcome::removed;
    } else if (leader.outcome != Outcome::ok) {
        ++counters_.failed_puts;
        hide(leader.number);
    } else {
        value.state = State::committed;
        value.is_verified = true;
        committed_bytes_ += value.length;
        committed_slot_bytes_ += u64{extents_.units(value.place.extent)} * kUnit;
        counters_.put_bytes += value.length;
        extents_.warm(value.place.extent, value.length);
    }
    leader.flight->outcome = leader.outcome;
    leader.flight->is_done = true;
    flights_.erase(leader.number);
    unpin(leader.number);
}

}  // namespace kbtp::store

// Making room: CLOCK inside a slot size, cold extents emptied for another, and the thread that does it ahead of need.
#include <algorithm>

#include "slab.hpp"

namespace kbtp::store {
namespace {

constexpr u64 kHysteresis = 2;     // an extent of another class is taken only if it is that much colder
constexpr u64 kWatchedSlots = 32;  // smaller classes have no watermark: a slot of theirs is much of them
constexpr int kRoundsMost = 256;
constexpr std::chrono::seconds kSpaceRetry{60};
constexpr u64 kSparedSteps = u64{1} << 16;  // of CLOCK's hand, in which it spares what was read

u64 low_mark(u64 slots) { return std::max<u64>(1, slots / 64); }
u64 high_mark(u64 slots) { return std::max<u64>(2, slots / 32); }

}  // namespace

// With few free slots and no free extent left, the housekeeper evicts before a put has to.
void Slab::watch_level(u32 units) {
    if (extents_.free_extents() > 0) return;
    units = extents_.slot_size(units);
    const auto* c = extents_.size_class(units);
    if (!c || c->slots < kWatchedSlots || c->free >= low_mark(c->slots)) return;
    if (low_.insert(units).second) house_work_.notify_one();
}

std::vector<u32> Slab::choose_victims(u32 units, u64 count) {
    std::vector<u32> victims;
    auto* c = extents_.size_class(units);
    if (!c) return victims;
    const u64 steps_most = 2 * c->slots, spared_steps = kSparedSteps + 4 * count;
    for (u64 step = 0; step < steps_most && victims.size() < count; ++step) {
        const u32 number = extents_.next_in(*c);
        if (number == kNone) continue;
        Value& value = values_[number];
        if (value.state != State::committed || value.pins > 0) continue;
        if (value.was_read && step < spared_steps) {
            value.was_read = false;
            continue;
        }
        hide(number);
        value.has_clearer = true;
        victims.push_back(number);
    }
    counters_.evicted += victims.size();
    return victims;
}

// The extent of another slot size to empty for this one, or kNone if this one gives something up itself.
u32 Slab::choose_drain(u32 units) {
    const u32 other = extents_.coldest(units, false);
    if (other == kNone) return kNone;
    const u32 own = extents_.coldest(units, true);
    if (own == kNone) return other;
    return extents_.is_colder(other, own, kHysteresis) ? other : kNone;
}

// Sees to it that `count` values of so many units find slots, as far as anything can go for them.
void Slab::make_room(u32 units, u64 count) {
    const std::lock_guard room(room_);
    std::unique_lock lock(mutex_);
    ++counters_.reclaims;
    const u32 size = extents_.slot_size(units);
    // Others take slots meanwhile; after so many rounds they had their share.
    for (int round = 0; round < kRoundsMost; ++round) {
        const u64 available = extents_.available(size);
        if (available >= count) return;
        const u32 other = choose_drain(size);
        if (other != kNone) {
            if (!drain(other, lock)) return;
            continue;
        }
        const auto victims = choose_victims(size, count - available);
        if (victims.empty()) return;
        lock.unlock();
        const bool is_clear = clear(victims) == 0;
        lock.lock();
        if (!is_clear) return;
    }
}

// Empties an extent; false if nothing went. Unlocks while it does.
bool Slab::drain(u32 extent, std::unique_lock<std::mutex>& lock) {
    std::vector<u32> numbers = extents_.begin_drain(extent);
    std::erase_if(numbers, [&](u32 number) { return values_[number].state != State::committed; });  // their hiders clear them
    for (const u32 number : numbers) {
        hide(number);
        values_[number].has_clearer = true;
    }
    counters_.evicted += numbers.size();
    ++counters_.drained_extents;
    lock.unlock();
    const int error = disk_.clear_part(extent);
    lock.lock();
    for (const u32 number : numbers) {
        if (error) {
            to_clear_.push_back(number);
            continue;
        }
        extents_.give_back(values_[number].place);
        values_.forget(number);
    }
    extents_.end_drain(extent);
    return error == 0 && !numbers.empty();
}

// The table is sparse and may find the filesystem full; an emptied extent's records give blocks back. Whether a retry makes sense: where
// one did not help lately, no more values are given up for another.
bool Slab::make_space_on_filesystem() {
    const std::lock_guard room(room_);
    std::unique_lock lock(mutex_);
    if (Clock::now() < space_retry_at_) return false;
    ++counters_.space_retries;
    space_retry_at_ = Clock::now() + kSpaceRetry;
    const u32 extent = extents_.coldest(0, false);
    return extent == kNone || drain(extent, lock);
}

void Slab::has_space_on_filesystem() {
    const std::lock_guard guard(mutex_);
    space_retry_at_ = {};
}

void Slab::keep_house() {
    std::unique_lock lock(mutex_);
    while (!is_ending_) {
        if (disk_.is_degraded() || (to_clear_.empty() && low_.empty())) {
            house_work_.wait(lock);
            continue;
        }
        const std::vector<u32> numbers = std::move(to_clear_);
        to_clear_.clear();
        const std::set<u32> low = std::move(low_);
        low_.clear();
        lock.unlock();
        const int error = numbers.empty() ? 0 : clear(numbers);
        for (const u32 units : low) {
            u64 wanted = 0;
            {
                const std::lock_guard guard(mutex_);
                if (const auto* c = extents_.size_class(units)) wanted = high_mark(c->slots);
            }
            if (wanted > 0) make_room(units, wanted);
        }
        lock.lock();
        if (error && !is_ending_) house_work_.wait_for(lock, std::chrono::seconds(1));
    }
}

}  // namespace kbtp::store

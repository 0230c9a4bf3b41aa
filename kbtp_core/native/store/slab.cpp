// Reading, finding, removing and listing. slab_put.cpp writes, slab_room.cpp evicts, slab_life.cpp starts and ends.
#include "slab.hpp"

#include <algorithm>
#include <ctime>

#include "check.hpp"

namespace kbtp::store {
namespace {

constexpr u32 kStep = u32{1} << 14;    // entries looked at in one go, so that nobody waits long for the mutex
constexpr u32 kListed = u32{1} << 19;  // entries that one call of `list` looks at, so that nobody waits long for it
constexpr std::size_t kAhead = 12;     // keys whose memory is asked for before it is needed
constexpr u16 kPinsMost = 0xFFF0;
constexpr std::size_t kClearedAtOnce = std::size_t{1} << 16;

u32 unix_now() { return static_cast<u32>(std::time(nullptr)); }

}  // namespace

bool Slab::can_serve(u32 number, u32 now) const {
    if (number == kNone) return false;
    const Value& value = values_[number];
    return value.state == State::committed && (value.expiry == 0 || value.expiry > now);
}

void Slab::hide(u32 number) {
    Value& value = values_[number];
    if (value.state == State::committed) {
        committed_bytes_ -= value.length;
        committed_slot_bytes_ -= u64{extents_.units(value.place.extent)} * kUnit;
    }
    ledger_->release(value.key.tenant, value.length);
    values_.hide(number);
}

void Slab::drop(u32 number) {
    hide(number);
    if (values_[number].pins > 0) return;  // the last pin sees to it
    to_clear_.push_back(number);
    house_work_.notify_one();
}

void Slab::unpin(u32 number) {
    Value& value = values_[number];
    KBTP_CHECK(value.pins > 0);
    extents_.unpin(value.place.extent);
    if (--value.pins > 0 || value.state != State::hidden) return;
    if (value.has_clearer) return unpinned_.notify_all();
    to_clear_.push_back(number);
    house_work_.notify_one();
}

void Slab::get(const GetBatch& b) {
    const std::shared_lock life(life_);
    const auto transfers = std::make_shared<std::vector<Transfer>>();
    std::vector<Reading> readings;
    std::unique_lock lock(mutex_);
    const bool is_away = is_closed_ || disk_.is_degraded();
    const u32 now = unix_now();
    for (std::size_t i = 0; i < b.addresses.size(); ++i) {
        b.stored[i] = b.copied[i] = b.crcs[i] = 0;
        b.outcomes[i] = static_cast<u8>(Outcome::miss);
        const u32 number = is_away ? kNone : values_.find(key_at(b.keys + i * kKeyOctets));
        if (!can_serve(number, now) || values_[number].pins >= kPinsMost) continue;
        Value& value = values_[number];
        b.stored[i] = value.length;
        b.crcs[i] = value.crc;
        b.outcomes[i] = static_cast<u8>(b.offsets[i] > value.length ? Outcome::length : Outcome::ok);
        if (b.offsets[i] > value.length) continue;
        const u32 wanted = std::min(b.capacities[i], value.length - b.offsets[i]);
        value.was_read = true;
        if (wanted == 0) continue;
        ++value.pins;
        extents_.pin(value.place.extent);
        extents_.warm(value.place.extent, wanted);
        const u64 payload = disk_.geometry().payload_at(value.place, extents_.units(value.place.extent));
        const bool is_whole = wanted == value.length || !value.is_verified;
        transfers->push_back({payload, reinterpret_cast<u8*>(b.addresses[i]), value.length, b.offsets[i], b.offsets[i] + wanted, is_whole});
        readings.push_back({i, number});
    }
    lock.unlock();
    const int error = readings.empty() ? 0 : disk_.read(transfers);
    lock.lock();
    for (std::size_t k = 0; k < readings.size(); ++k) {
        const auto [i, number] = readings[k];
        // Of an abandoned batch nothing is looked at: its threads may still be at work.
        const Transfer* t = error == 0 ? &(*transfers)[k] : nullptr;
        Value& value = values_[number];
        const bool was_read = t && t->error == 0, is_right = was_read && (!t->is_whole || t->crc == value.crc);
        if (was_read) disk_.count_good_read();
        if (!was_read) ++counters_.read_errors;
        if (t && !was_read) disk_.count_read_error(t->error);
        if (was_read && !is_right) {
            ++counters_.checksum_errors;
            if (value.state == State::committed) hide(number);
        }
        if (is_right && t->is_whole) value.is_verified = true;
        if (is_right && value.state == State::committed) {
            b.copied[i] = t->end - t->begin;
            counters_.hit_bytes += b.copied[i];
        } else {
            b.outcomes[i] = static_cast<u8>(Outcome::miss);
            b.stored[i] = b.crcs[i] = 0;
        }
        unpin(number);
    }
    for (std::size_t i = 0; i < b.addresses.size(); ++i)
        ++(b.outcomes[i] == static_cast<u8>(Outcome::miss) ? counters_.misses : counters_.hits);
}

void Slab::lookup(const u8* keys, std::span<u32> lengths) {
    const std::shared_lock life(life_);
    const bool is_away = is_closed_ || disk_.is_degraded();
    const u32 now = unix_now();
    for (std::size_t i = 0; i < lengths.size();) {
        const std::lock_guard guard(mutex_);
        for (const std::size_t end = std::min<std::size_t>(i + kStep, lengths.size()); i < end; ++i) {
            if (i + 2 * kAhead < end) values_.fetch_bucket(key_at(keys + (i + 2 * kAhead) * kKeyOctets));
            if (i + kAhead < end) values_.fetch_value(key_at(keys + (i + kAhead) * kKeyOctets));
            const u32 number = is_away ? kNone : values_.find(key_at(keys + i * kKeyOctets));
            lengths[i] = can_serve(number, now) ? values_[number].length : 0;
        }
    }
}

void Slab::remove(const u8* keys, std::span<u8> were_there) {
    const std::shared_lock life(life_);
    std::vector<u32> numbers;
    {
        const std::lock_guard guard(mutex_);
        const bool is_away = is_closed_ || disk_.is_degraded();
        const u32 now = unix_now();
        for (std::size_t i = 0; i < were_there.size(); ++i) {
            const u32 number = is_away ? kNone : values_.find(key_at(keys + i * kKeyOctets));
            were_there[i] = number != kNone && (values_[number].state == State::writing || can_serve(number, now));
            if (number == kNone) continue;
            hide(number);
            values_[number].has_clearer = true;
            numbers.push_back(number);
        }
        counters_.removed += numbers.size();
    }
    wait_and_clear(numbers);
}

// Hides all values that `which` names, with what is in flight; this thread clears them.
template <class Which>
std::vector<u32> Slab::hide_all(Which&& which) {
    std::vector<u32> numbers;
    for (u32 at = 0;;) {
        const std::lock_guard guard(mutex_);
        const u32 end = std::min(values_.end(), at + kStep);
        for (; at < end; ++at) {
            const Value& value = values_[at];
            if ((value.state != State::committed && value.state != State::writing) || !which(value)) continue;
            hide(at);
            values_[at].has_clearer = true;
            numbers.push_back(at);
        }
        if (at >= values_.end()) return numbers;
    }
}

u64 Slab::remove_namespace(u64 tenant, u64 name_space) {
    const std::shared_lock life(life_);
    if (is_closed_ || disk_.is_degraded()) return 0;
    const auto numbers = hide_all([&](const Value& v) { return v.key.tenant == tenant && v.name_space == name_space; });
    wait_and_clear(numbers);
    const std::lock_guard guard(mutex_);
    counters_.removed += numbers.size();
    return numbers.size();
}

u64 Slab::expire(u32 now) {
    const std::shared_lock life(life_);
    if (is_closed_ || disk_.is_degraded()) return 0;
    const auto numbers = hide_all([&](const Value& v) { return v.expiry != 0 && v.expiry <= now && v.state == State::committed; });
    wait_and_clear(numbers);
    const std::lock_guard guard(mutex_);
    counters_.expired += numbers.size();
    return numbers.size();
}

void Slab::wait_and_clear(const std::vector<u32>& numbers) {
    for (std::size_t first = 0; first < numbers.size(); first += kClearedAtOnce) {
        const auto begin = numbers.begin() + static_cast<std::ptrdiff_t>(first);
        const std::vector<u32> some(begin, begin + static_cast<std::ptrdiff_t>(std::min(kClearedAtOnce, numbers.size() - first)));
        {
            // Reads and writes end, if need be because the disk hangs, so this wait does too.
            std::unique_lock lock(mutex_);
            for (const u32 number : some) unpinned_.wait(lock, [&] { return values_[number].pins == 0; });
        }
        clear(some);
    }
}

int Slab::clear(const std::vector<u32>& numbers) {
    std::vector<u64> records;
    {
        const std::lock_guard guard(mutex_);
        for (const u32 number : numbers) records.push_back(disk_.geometry().record_at(values_[number].place));
    }
    const int error = disk_.clear(std::move(records));
    const std::lock_guard guard(mutex_);
    for (const u32 number : numbers) {
        if (error) {  // the housekeeper tries again
            to_clear_.push_back(number);
            continue;
        }
        extents_.give_back(values_[number].place);
        values_.forget(number);
    }
    return error;
}

Listing Slab::list(std::optional<u64> tenant, std::optional<u64> name_space, u64 cursor, u64 most) {
    const std::shared_lock life(life_);
    Listing listing;
    if (is_closed_ || disk_.is_degraded() || most == 0) return listing;
    const u32 now = unix_now();
    u32 at = static_cast<u32>(std::min<u64>(cursor, kNone - 1));
    for (u32 looked = 0;; looked += kStep) {
        const std::lock_guard guard(mutex_);
        const u32 end = at + std::min(values_.end() - std::min(at, values_.end()), kStep);
        for (; at < end && listing.lengths.size() < most; ++at) {
            const Value& value = values_[at];
            if (!can_serve(at, now) || (tenant && value.key.tenant != *tenant) || (name_space && value.name_space != *name_space)) continue;
            listing.keys.resize(listing.keys.size() + kKeyOctets);
            key_to(listing.keys.data() + listing.keys.size() - kKeyOctets, value.key);
            listing.lengths.push_back(value.length);
            listing.expiries.push_back(value.expiry);
        }
        if (at >= values_.end()) return listing;
        listing.cursor = at;
        if (listing.lengths.size() >= most || looked + kStep >= kListed) return listing;
        listing.cursor = 0;
    }
}

}  // namespace kbtp::store

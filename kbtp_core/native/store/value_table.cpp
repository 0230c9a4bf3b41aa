#include "value_table.hpp"

#include <random>

#include "check.hpp"

namespace kbtp::store {

ValueTable::ValueTable() : buckets_(1024, kNone) {
    std::random_device device;
    seed_ = u64{device()} << 32 | device();
}

u64 ValueTable::home(const Key& key) const {
    __extension__ using u128 = unsigned __int128;
    const u128 mixed = static_cast<u128>(key.id[0] ^ seed_) * ((key.id[1] ^ key.tenant) | 1);
    const u64 folded = (static_cast<u64>(mixed) ^ static_cast<u64>(mixed >> 64)) * 0x9E3779B97F4A7C15;
    return (folded >> 20) & (buckets_.size() - 1);
}

u32 ValueTable::find(const Key& key) const {
    const u64 mask = buckets_.size() - 1;
    for (u64 at = home(key);; at = (at + 1) & mask) {
        const u32 number = buckets_[at];
        if (number == kNone || (*this)[number].key == key) return number;
    }
}

void ValueTable::fetch_value(const Key& key) const {
    const u32 number = buckets_[home(key)];
    if (number != kNone) __builtin_prefetch(&(*this)[number]);
}

u32 ValueTable::add(const Value& value) {
    if ((found_count_ + 1) * 5 > buckets_.size() * 4) resize(buckets_.size() * 2);
    u32 number = free_;
    if (number != kNone) {
        free_ = (*this)[number].place.extent;
    } else {
        number = end_++;
        if (number >> kChunkBits == chunks_.size()) chunks_.push_back(std::make_unique<Value[]>(kChunk));
    }
    (*this)[number] = value;
    const u64 mask = buckets_.size() - 1;
    u64 at = home(value.key);
    while (buckets_[at] != kNone) at = (at + 1) & mask;
    buckets_[at] = number;
    ++found_count_;
    return number;
}

u64 ValueTable::bucket_of(u32 number) const {
    const u64 mask = buckets_.size() - 1;
    u64 at = home((*this)[number].key);
    while (buckets_[at] != number) {
        KBTP_CHECK(buckets_[at] != kNone);
        at = (at + 1) & mask;
    }
    return at;
}

void ValueTable::hide(u32 number) {
    const u64 mask = buckets_.size() - 1;
    u64 hole = bucket_of(number);
    for (u64 at = (hole + 1) & mask; buckets_[at] != kNone; at = (at + 1) & mask) {
        // An entry may fill the hole if the hole lies between its home and where it is now.
        const u64 origin = home((*this)[buckets_[at]].key);
        if (((at - origin) & mask) < ((at - hole) & mask)) continue;
        buckets_[hole] = buckets_[at];
        hole = at;
    }
    buckets_[hole] = kNone;
    --found_count_;
    (*this)[number].state = State::hidden;
}

void ValueTable::forget(u32 number) {
    Value& value = (*this)[number];
    KBTP_CHECK(value.state == State::hidden && value.pins == 0);
    value = Value{};
    value.place.extent = free_;
    free_ = number;
}

void ValueTable::resize(u64 buckets) {
    std::vector<u32> old(buckets, kNone);
    old.swap(buckets_);
    const u64 mask = buckets - 1;
    for (const u32 number : old) {
        if (number == kNone) continue;
        u64 at = home((*this)[number].key);
        while (buckets_[at] != kNone) at = (at + 1) & mask;
        buckets_[at] = number;
    }
}

void ValueTable::check_integrity() const {
    u64 found = 0;
    for (u32 number = 0; number < end_; ++number) {
        const Value& value = (*this)[number];
        if (value.state != State::writing && value.state != State::committed) continue;
        ++found;
        KBTP_CHECK(find(value.key) == number);
    }
    KBTP_CHECK(found == found_count_);
}

}  // namespace kbtp::store

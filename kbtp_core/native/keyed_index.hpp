// From the key of a value to its number: open addressing with linear probing, four octets a bucket, at most half of them full. The keys
// themselves lie with the values, so that the index costs 16 octets a value at most.
//
// One caller at a time.
#pragma once

#include <array>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "bytes.hpp"

namespace kbtp {

struct ValueKey {
    u64 tenant;
    std::array<u8, 16> id;
    bool operator==(const ValueKey&) const = default;

    static ValueKey from(u64 tenant, const u8* id) {
        ValueKey key{tenant, {}};
        std::memcpy(key.id.data(), id, key.id.size());
        return key;
    }
};

struct ValueKeyHash {
    // Ids are heads of hashes, but a peer may choose them: without the seed it can't choose those that collide.
    u64 seed = std::random_device{}() | u64{std::random_device{}()} << 32;
    u64 operator()(const ValueKey& key) const {
        u64 low, high;
        std::memcpy(&low, key.id.data(), 8);
        std::memcpy(&high, key.id.data() + 8, 8);
        u64 h = mix(low ^ seed, high ^ key.tenant);
        return mix(h ^ seed, 0x9e37'79b9'7f4a'7c15);
    }

  private:
    static u64 mix(u64 a, u64 b) {
        const auto product = static_cast<unsigned __int128>(a | 1) * (b | 1);
        return static_cast<u64>(product) ^ static_cast<u64>(product >> 64) ^ a ^ b;
    }
};

// Numbers below `capacity`; `key_of(number)` says whose key it is.
template <class KeyOf>
class KeyedIndex {
  public:
    static constexpr u32 kNone = ~u32{0};

    KeyedIndex(u64 capacity, KeyOf key_of) : key_of_(key_of) {
        u64 buckets = 8;
        while (buckets < 2 * capacity) buckets *= 2;
        buckets_.assign(buckets, kNone);
    }

    u32 find(const ValueKey& key) const {
        for (u64 at = home(key);; at = next(at))
            if (buckets_[at] == kNone || key_of_(buckets_[at]) == key) return buckets_[at];
    }
    void prefetch(const ValueKey& key) const { __builtin_prefetch(&buckets_[home(key)]); }
    // The key is not in it.
    void insert(const ValueKey& key, u32 number) {
        u64 at = home(key);
        while (buckets_[at] != kNone) at = next(at);
        buckets_[at] = number;
        ++count_;
    }
    // The key is in it. What lies behind moves up, so that no probe ends too early.
    void erase(const ValueKey& key) {
        u64 hole = home(key);
        while (!(key_of_(buckets_[hole]) == key)) hole = next(hole);
        for (u64 at = next(hole); buckets_[at] != kNone; at = next(at)) {
            const u64 wanted = home(key_of_(buckets_[at]));
            if (((at - wanted) & mask()) < ((at - hole) & mask())) continue;
            buckets_[hole] = buckets_[at];
            hole = at;
        }
        buckets_[hole] = kNone;
        --count_;
    }
    u64 count() const { return count_; }
    u64 bytes() const { return buckets_.size() * sizeof(u32); }

  private:
    u64 mask() const { return buckets_.size() - 1; }
    u64 home(const ValueKey& key) const { return hash_(key) & mask(); }
    u64 next(u64 at) const { return (at + 1) & mask(); }

    const KeyOf key_of_;
    const ValueKeyHash hash_;
    std::vector<u32> buckets_;
    u64 count_ = 0;
};

}  // namespace kbtp

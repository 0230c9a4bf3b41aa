// The index: values in chunks that never move, found by key through an open-addressing table of their numbers.
//
// A value costs its 64 octets, 5 to 10 of the table, and 4 in its extent. Not synchronised: the engine's mutex guards it.
#pragma once

#include <memory>
#include <vector>

#include "value.hpp"

namespace kbtp::store {

class ValueTable {
  public:
    ValueTable();

    // The number of the value with this key that can be found, or kNone.
    u32 find(const Key& key) const;
    // Ahead of a find of this key: asks for the memory that it will look at, first the bucket, then, once that has come, the value.
    void fetch_bucket(const Key& key) const { __builtin_prefetch(&buckets_[home(key)]); }
    void fetch_value(const Key& key) const;
    // A value in a fresh entry, found by its key from now on. No other value with that key may be findable.
    u32 add(const Value& value);
    // Not found by its key any more; the entry stays.
    void hide(u32 number);
    // The entry of a hidden value may be used again.
    void forget(u32 number);

    Value& operator[](u32 number) { return chunks_[number >> kChunkBits][number & (kChunk - 1)]; }
    const Value& operator[](u32 number) const { return chunks_[number >> kChunkBits][number & (kChunk - 1)]; }
    u32 end() const { return end_; }  // entries have smaller numbers, free ones among them
    u64 found_count() const { return found_count_; }
    u64 memory_bytes() const { return chunks_.size() * kChunk * sizeof(Value) + buckets_.capacity() * sizeof(u32); }
    void check_integrity() const;  // aborts where it does not hold

  private:
    static constexpr u32 kChunkBits = 14, kChunk = u32{1} << kChunkBits;

    u64 home(const Key& key) const;
    u64 bucket_of(u32 number) const;
    void resize(u64 buckets);

    std::vector<std::unique_ptr<Value[]>> chunks_;
    std::vector<u32> buckets_;  // numbers, or kNone
    u64 seed_;                  // so that nobody can choose keys that meet
    u64 found_count_ = 0;
    u32 end_ = 0, free_ = kNone;  // free entries are chained by their place's extent
};

}  // namespace kbtp::store

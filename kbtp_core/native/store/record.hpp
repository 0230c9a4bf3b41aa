// What a slab leaves on disk beside the payloads: the superblock and the table's records. All integers little-endian.
//
// A record has 64 octets and belongs to one slot of one extent; a place in the table is a place on the disk:
//    0 CRC-32C u32, over the store's id, the record's place and the octets after it    32 namespace u64
//    4 payload CRC-32C u32                                                             40 sequence u64
//    8 tenant u64                                                                      48 length u32
//   16 object id, 16 octets                                                            52 expiry u32
//                                                                                      56 reserved u32, 60 units a slot u32
// so a record of another store, of another slot, or half of one is none. Zeros are a slot without a value.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "value.hpp"

namespace kbtp::store {

inline constexpr std::size_t kRecord = 64;
using StoreId = std::array<u8, 16>;
using Record = std::array<u8, kRecord>;

struct Geometry {
    u64 extent_bytes = 0, extent_count = 0;

    u64 slots_most() const { return extent_bytes / kUnit; }
    // The table has a part for each extent, long enough for the smallest slots; slots of an extent stand side by side in it.
    u64 part_bytes() const { return (slots_most() * kRecord + kUnit - 1) / kUnit * kUnit; }
    u64 table_bytes() const { return part_bytes() * extent_count; }
    u64 record_at(Place place) const { return place.extent * part_bytes() + u64{place.slot} * kRecord; }
    u64 payload_at(Place place, u32 units) const { return place.extent * extent_bytes + u64{place.slot} * units * kUnit; }
    bool operator==(const Geometry&) const = default;
};

Record write_record(const Value& value, u32 units, const StoreId& store, u64 at);

struct ReadRecord {
    Value value;  // its place is the reader's to set
    u32 units;
};
// Nothing if it is not exactly what write_record makes of some value at this place.
std::optional<ReadRecord> read_record(const u8* octets, const StoreId& store, u64 at);

inline constexpr std::size_t kSuperblock = 4096;
inline constexpr u32 kFormat = 1;

struct Superblock {
    Geometry geometry;
    StoreId id{};
    u64 epoch = 0;          // one more each time the store is opened
    u64 sequence = 0;       // none was given out from here on, if it is clean
    bool is_clean = false;  // closed in order: nothing was in flight
};

std::array<u8, kSuperblock> write_superblock(const Superblock& block);
// Throws StoreError that says what is wrong with it; `path` names it.
Superblock read_superblock(const std::array<u8, kSuperblock>& octets, const std::string& path);

}  // namespace kbtp::store

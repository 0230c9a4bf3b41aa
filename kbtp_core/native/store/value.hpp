// What a disk engine says of a value, in memory.
#pragma once

#include "../bytes.hpp"

namespace kbtp::store {

inline constexpr u32 kUnit = 4096;        // slots, and what is read and written, are whole units
inline constexpr u32 kNone = 0xFFFFFFFF;  // no value, no extent

// Per item; kbtp_core/store/disk.py has the same numbers.
enum class Outcome : u8 { ok = 0, miss = 1, exists = 2, length = 3, no_space = 4, quota = 5, io_error = 6, removed = 7 };

struct Key {
    u64 tenant;
    u64 id[2];  // as the octets stand

    bool operator==(const Key&) const = default;
};

inline constexpr std::size_t kKeyOctets = 24;  // tenant, big-endian, and object id

inline Key key_at(const u8* at) {
    Key key{load_be<u64>(at), {}};
    std::memcpy(key.id, at + 8, 16);
    return key;
}
inline void key_to(u8* at, const Key& key) {
    store_be(at, key.tenant);
    std::memcpy(at + 8, key.id, 16);
}

struct Place {
    u32 extent = kNone, slot = 0;
};

// free -> writing -> committed -> hidden -> free; a value that failed or was removed under way goes from writing to hidden.
// Only writing and committed ones can be found by key. A hidden one has its slot until its record was cleared on disk.
enum class State : u8 { free, writing, committed, hidden };

struct Value {
    Key key{};
    u64 name_space = 0;
    u64 sequence = 0;  // of two records of one key, the higher is the newer
    u32 length = 0;
    u32 crc = 0;     // CRC-32C of the payload
    u32 expiry = 0;  // unix seconds; 0: never
    Place place;
    u16 pins = 0;  // reads and writes in flight; the slot is not given away while there are any
    State state = State::free;
    bool was_read : 1 = false;     // since CLOCK's hand came by
    bool is_verified : 1 = false;  // the payload was written or checked by this process
    bool has_clearer : 1 = false;  // somebody waits for the last pin and clears the record then
};
static_assert(sizeof(Value) == 64);

inline u32 units_of(u32 length) { return length / kUnit + (length % kUnit != 0); }  // for every length, whoever wrote it

}  // namespace kbtp::store

// One value's payload between its slot and the caller's memory.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "../crc32c.hpp"
#include "value.hpp"

namespace kbtp::store {

struct Transfer {
    u64 payload = 0;  // where it begins on the disk
    u8* address = nullptr;
    u32 length = 0;          // of the value
    u32 begin = 0, end = 0;  // read: the part that the caller gets
    bool is_whole = false;   // read: all octets, for their checksum
    u32 crc = 0;             // read: of the whole, or of the part
    int error = 0;

    // What is read of the value: whole units, and what of them counts.
    u32 read_begin() const { return is_whole ? 0 : begin & ~(kUnit - 1); }
    u32 read_end() const { return is_whole ? length : end; }

    // `octets` were read from `at` of the value on: the checksum goes on over those that count, and what lies in [begin, end) is copied.
    void take(const u8* octets, u32 at, u32 size) {
        const u32 skipped = is_whole || at >= begin ? 0 : begin - at;  // the part begins inside a unit
        octets += skipped, at += skipped, size -= skipped;
        const u32 first = std::clamp(begin, at, at + size), last = std::clamp(end, first, at + size);
        if (is_whole) crc = crc32c_extend(crc, octets, first - at);
        crc = crc32c_copy(crc, address + (first - begin), octets + (first - at), last - first);
        if (is_whole) crc = crc32c_extend(crc, octets + (last - at), at + size - last);
    }
};
using Transfers = std::shared_ptr<std::vector<Transfer>>;

inline u32 whole_units(u32 octets) { return (octets + (kUnit - 1)) & ~(kUnit - 1); }

}  // namespace kbtp::store

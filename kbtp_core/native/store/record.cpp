#include "record.hpp"

#include "../crc32c.hpp"
#include "store_error.hpp"

namespace kbtp::store {
namespace {

constexpr char kMagic[8] = {'K', 'B', 'T', 'P', 'S', 'L', 'A', 'B'};

// Swaps on a big-endian host only.
template <class T>
T little(T v) {
    return std::endian::native == std::endian::little ? v : swap_to_host(v);
}
template <class T>
void put(u8* at, T v) {
    v = little(v);
    std::memcpy(at, &v, sizeof v);
}
template <class T>
T get(const u8* at) {
    T v;
    std::memcpy(&v, at, sizeof v);
    return little(v);
}

u32 record_crc(const u8* record, const StoreId& store, u64 at) {
    std::array<u8, 24> place;
    std::memcpy(place.data(), store.data(), store.size());
    put(place.data() + 16, at);
    return crc32c_extend(crc32c_extend(0, place.data(), place.size()), record + 4, kRecord - 4);
}

}  // namespace

Record write_record(const Value& value, u32 units, const StoreId& store, u64 at) {
    Record record{};
    u8* r = record.data();
    put(r + 4, value.crc);
    put(r + 8, value.key.tenant);
    std::memcpy(r + 16, value.key.id, 16);
    put(r + 32, value.name_space);
    put(r + 40, value.sequence);
    put(r + 48, value.length);
    put(r + 52, value.expiry);
    put(r + 60, units);
    put(r, record_crc(r, store, at));
    return record;
}

std::optional<ReadRecord> read_record(const u8* octets, const StoreId& store, u64 at) {
    if (get<u32>(octets) != record_crc(octets, store, at)) return {};
    ReadRecord read{};
    Value& value = read.value;
    value.crc = get<u32>(octets + 4);
    value.key.tenant = get<u64>(octets + 8);
    std::memcpy(value.key.id, octets + 16, 16);
    value.name_space = get<u64>(octets + 32);
    value.sequence = get<u64>(octets + 40);
    value.length = get<u32>(octets + 48);
    value.expiry = get<u32>(octets + 52);
    read.units = get<u32>(octets + 60);
    if (value.length == 0 || read.units < units_of(value.length)) return {};
    return read;
}

std::array<u8, kSuperblock> write_superblock(const Superblock& block) {
    std::array<u8, kSuperblock> octets{};
    u8* o = octets.data();
    std::memcpy(o, kMagic, sizeof kMagic);
    put(o + 8, kFormat);
    put(o + 12, static_cast<u32>(kRecord));
    put(o + 16, static_cast<u32>(kUnit));
    put(o + 20, static_cast<u32>(block.is_clean));
    put(o + 24, block.geometry.extent_bytes);
    put(o + 32, block.geometry.extent_count);
    put(o + 40, block.epoch);
    put(o + 48, block.sequence);
    std::memcpy(o + 56, block.id.data(), block.id.size());
    put(o + kSuperblock - 4, crc32c_extend(0, o, kSuperblock - 4));
    return octets;
}

Superblock read_superblock(const std::array<u8, kSuperblock>& octets, const std::string& path) {
    const u8* o = octets.data();
    if (std::memcmp(o, kMagic, sizeof kMagic) != 0) throw StoreError(path + " is no superblock of a KBTP slab: use another folder");
    if (const u32 format = get<u32>(o + 8); format != kFormat)
        throw StoreError(path + " has format " + std::to_string(format) + ", this version reads format " + std::to_string(kFormat) +
                         ": open it with the version that wrote it, or use another folder");
    if (get<u32>(o + kSuperblock - 4) != crc32c_extend(0, o, kSuperblock - 4))
        throw StoreError(path + " is damaged (its checksum does not match): the store is left as it is; use another folder");
    if (get<u32>(o + 12) != kRecord || get<u32>(o + 16) != kUnit)
        throw StoreError(path + " has records of " + std::to_string(get<u32>(o + 12)) + " and units of " +
                         std::to_string(get<u32>(o + 16)) + " octets, this version has " + std::to_string(kRecord) + " and " +
                         std::to_string(kUnit));
    Superblock block;
    block.is_clean = get<u32>(o + 20) != 0;
    block.geometry = {get<u64>(o + 24), get<u64>(o + 32)};
    block.epoch = get<u64>(o + 40);
    block.sequence = get<u64>(o + 48);
    std::memcpy(block.id.data(), o + 56, block.id.size());
    return block;
}

}  // namespace kbtp::store

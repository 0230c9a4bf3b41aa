#include "extents.hpp"

#include <algorithm>

#include "check.hpp"

namespace kbtp::store {

Extents::Extents(u32 count, u64 extent_bytes)
    : extent_units_(extent_bytes / kUnit), epoch_bytes_(std::max<u64>(count * extent_bytes / 16, extent_bytes)), extents_(count) {
    for (u32 extent = count; extent-- > 0;) free_.push_back(extent);
}

std::optional<Place> Extents::take_open(u32 units) {
    const auto found = classes_.find(units);
    if (found == classes_.end()) return {};
    std::vector<u32>& open = found->second.open;
    while (!open.empty() && (extents_[open.back()].free == 0 || extents_[open.back()].is_draining)) {
        extents_[open.back()].is_open = false;
        open.pop_back();
    }
    if (open.empty()) return {};
    const u32 extent = open.back();
    --found->second.free;
    return Place{extent, take_slot(extent)};
}

// Exact while sizes are few for so many extents; then in eighths of an octave, in quarters, and at last in octaves, so that they stay few.
u32 Extents::slot_size(u32 units) const {
    const u64 quarters = classes_.size() * 4 / extents_.size();  // of so many as there are extents
    if (classes_.contains(units) || quarters == 0) return units;
    const u32 octave = std::bit_floor(units), step = std::max(octave / (quarters == 1 ? 8 : quarters == 2 ? 4 : 1), u32{1});
    return std::min((units + step - 1) / step * step, units_most());
}

std::optional<Place> Extents::take(u32 units) {
    const u32 size = slot_size(units);
    if (const auto place = take_open(size)) return place;
    if (free_.empty()) return {};
    const u32 extent = free_.back();
    free_.pop_back();
    bind(extent, size);
    return take_open(size);
}

u64 Extents::available(u32 size) const {
    const auto found = classes_.find(size);
    return (found == classes_.end() ? 0 : found->second.free) + free_.size() * slots_in(size);
}

u32 Extents::take_slot(u32 extent) {
    Extent& e = extents_[extent];
    while (e.free_slots[e.first_word] == 0) ++e.first_word;
    const u32 bit = static_cast<u32>(std::countr_zero(e.free_slots[e.first_word]));
    e.free_slots[e.first_word] &= ~(u64{1} << bit);
    --e.free;
    return e.first_word * 64 + bit;
}

bool Extents::restore(Place place, u32 units) {
    if (units == 0 || units > extent_units_ || place.slot >= slots_in(units)) return false;
    Extent& e = extents_[place.extent];
    if (e.units == 0) bind(place.extent, units);
    if (e.units != units) return false;
    e.free_slots[place.slot / 64] &= ~(u64{1} << place.slot % 64);
    --e.free;
    --classes_[units].free;
    return true;
}

void Extents::end_restore() {
    std::erase_if(free_, [&](u32 extent) { return extents_[extent].units != 0; });
}

void Extents::give_back(Place place) {
    Extent& e = extents_[place.extent];
    const u64 bit = u64{1} << place.slot % 64;
    u64& word = e.free_slots[place.slot / 64];
    KBTP_CHECK((word & bit) == 0);
    word |= bit;
    e.owners[place.slot] = kNone;
    e.first_word = std::min(e.first_word, place.slot / 64);
    ++e.free;
    SizeClass& c = classes_[e.units];
    ++c.free;
    e.free == e.slots ? unbind(place.extent) : open(place.extent);
}

void Extents::open(u32 extent) {
    Extent& e = extents_[extent];
    if (e.is_open || e.is_draining || e.free == 0) return;
    e.is_open = true;
    classes_[e.units].open.push_back(extent);
}

void Extents::bind(u32 extent, u32 units) {
    Extent& e = extents_[extent];
    e = Extent{};
    e.units = units;
    e.slots = e.free = slots_in(units);
    e.free_slots.assign((e.slots + 63) / 64, ~u64{0});
    if (e.slots % 64 != 0) e.free_slots.back() = (u64{1} << e.slots % 64) - 1;
    e.owners.assign(e.slots, kNone);
    e.heat_epoch = used_bytes_ / epoch_bytes_;
    e.last_used = used_bytes_;
    SizeClass& c = classes_[units];
    e.place_in_class = static_cast<u32>(c.extents.size());
    c.extents.push_back(extent);
    open(extent);
    c.slots += e.slots;
    c.free += e.slots;
}

void Extents::unbind(u32 extent) {
    Extent& e = extents_[extent];
    KBTP_CHECK(e.free == e.slots && e.pins == 0);
    const auto found = classes_.find(e.units);
    SizeClass& c = found->second;
    c.extents[e.place_in_class] = c.extents.back();
    extents_[c.extents.back()].place_in_class = e.place_in_class;
    c.extents.pop_back();
    if (e.is_open) std::erase(c.open, extent);
    c.slots -= e.slots;
    c.free -= e.slots;
    if (c.extents.empty()) classes_.erase(found);
    e = Extent{};
    free_.push_back(extent);
}

u64 Extents::heat(Extent& extent) const {
    const u64 epoch = used_bytes_ / epoch_bytes_, passed = epoch - extent.heat_epoch;
    extent.heat = passed < 64 ? extent.heat >> passed : 0;
    extent.heat_epoch = epoch;
    return extent.heat;
}

void Extents::warm(u32 extent, u64 bytes) {
    used_bytes_ += bytes;
    Extent& e = extents_[extent];
    e.heat = heat(e) + bytes;
    e.last_used = used_bytes_;
}

Extents::SizeClass* Extents::size_class(u32 units) {
    const auto found = classes_.find(units);
    return found == classes_.end() ? nullptr : &found->second;
}

u32 Extents::coldest(u32 units, bool of_class) {
    u32 best = kNone;
    const auto consider = [&](u32 extent) {
        if (extents_[extent].pins == 0 && !extents_[extent].is_draining && (best == kNone || is_colder(extent, best, 1))) best = extent;
    };
    if (!of_class) {
        for (u32 extent = 0; extent < extents_.size(); ++extent)
            if (extents_[extent].units != 0 && extents_[extent].units != units) consider(extent);
    } else if (const SizeClass* c = size_class(units)) {
        for (const u32 extent : c->extents) consider(extent);
    }
    return best;
}

bool Extents::is_colder(u32 extent, u32 than, u64 factor) {
    Extent &a = extents_[extent], &b = extents_[than];
    const u64 heat_a = heat(a), heat_b = heat(b);
    if (heat_a * factor != heat_b) return heat_a * factor < heat_b;
    return a.last_used < b.last_used;
}

std::vector<u32> Extents::begin_drain(u32 extent) {
    extents_[extent].is_draining = true;
    std::vector<u32> owners = extents_[extent].owners;
    std::erase(owners, kNone);
    return owners;
}

void Extents::end_drain(u32 extent) {
    extents_[extent].is_draining = false;
    open(extent);
}

u32 Extents::next_in(SizeClass& c) {
    if (c.hand >= c.extents.size()) c.hand = c.hand_slot = 0;
    const Extent& e = extents_[c.extents[c.hand]];
    if (c.hand_slot >= e.slots) {
        c.hand = (c.hand + 1) % static_cast<u32>(c.extents.size());
        c.hand_slot = 0;
        return next_in(c);
    }
    return e.owners[c.hand_slot++];
}

u64 Extents::memory_bytes() const {
    u64 bytes = extents_.capacity() * sizeof(Extent) + free_.capacity() * sizeof(u32);
    for (const Extent& e : extents_) bytes += e.owners.capacity() * sizeof(u32) + e.free_slots.capacity() * sizeof(u64);
    return bytes;
}

void Extents::check_integrity() const {
    u64 bound = 0;
    for (const auto& [units, c] : classes_) {
        u64 slots = 0, free = 0;
        for (const u32 extent : c.extents) {
            const Extent& e = extents_[extent];
            u64 bits = 0;
            for (const u64 word : e.free_slots) bits += static_cast<u64>(std::popcount(word));
            KBTP_CHECK(e.units == units && bits == e.free && c.extents[e.place_in_class] == extent);
            KBTP_CHECK(e.free == 0 || e.is_open || e.is_draining);
            slots += e.slots;
            free += e.free;
            ++bound;
        }
        KBTP_CHECK(slots == c.slots && free == c.free);
    }
    KBTP_CHECK(bound + free_.size() == extents_.size());
}

}  // namespace kbtp::store

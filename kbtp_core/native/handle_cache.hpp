// What a client remembers of lookups: where a value was when it was last seen. Bounded, and only a hint: a LOAD by handle and
// generation is refused where the value has gone since.
//
// A key has four places, by its own octets, which are a hash. A new key takes a place that is free or that was not asked for since
// the hand last came by. One caller at a time.
#pragma once

#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "bytes.hpp"

namespace kbtp {

class HandleCache {
  public:
    using Id = std::array<u8, 16>;
    struct Known {
        u64 handle;
        u16 generation;
    };

    explicit HandleCache(u32 log2_sets) : sets_(std::size_t{1} << log2_sets) {}

    std::optional<Known> find(const u8* id) {
        for (Place& place : set_of(id).places)
            if (place.is_used && std::memcmp(place.id.data(), id, 16) == 0) {
                place.was_asked = true;
                return Known{place.handle, place.generation};
            }
        return {};
    }

    void keep(const u8* id, Known known) {
        Set& set = set_of(id);
        Place* place = nullptr;
        for (Place& one : set.places)
            if (one.is_used && std::memcmp(one.id.data(), id, 16) == 0) place = &one;
        for (Place& one : set.places)
            if (!place && !one.is_used) place = &one;
        while (!place) {
            Place& one = set.places[set.hand++ % set.places.size()];
            if (one.was_asked)
                one.was_asked = false;
            else
                place = &one;
        }
        std::memcpy(place->id.data(), id, 16);
        place->handle = known.handle;
        place->generation = known.generation;
        place->is_used = true;
        place->was_asked = false;
    }

    void forget(const u8* id) {
        for (Place& place : set_of(id).places)
            if (place.is_used && std::memcmp(place.id.data(), id, 16) == 0) place.is_used = false;
    }

    void clear() { sets_.assign(sets_.size(), Set{}); }

  private:
    struct Place {
        Id id{};
        u64 handle = 0;
        u16 generation = 0;
        bool is_used = false, was_asked = false;
    };
    struct Set {
        std::array<Place, 4> places{};
        u8 hand = 0;
    };

    Set& set_of(const u8* id) { return sets_[load_be<u64>(id + 8) & (sets_.size() - 1)]; }

    std::vector<Set> sets_;
};

}  // namespace kbtp

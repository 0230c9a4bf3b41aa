// Who has which slot: fixed extents, each bound to the class of one slot size, or to none.
//
// Classes are exact: a slot size is the size of a value that came, in units of 4 KiB, so a page of any size fits without slack; only
// where more sizes come than there are extents for, later ones share. An extent
// that holds nothing goes back to the free ones, and an extent that has gone cold can be emptied for another class, so no mix of
// sizes that came first decides what fits later. How warm an extent is: the octets read and written in it, halved each time that a
// sixteenth of the disk's capacity was read and written anywhere.
//
// Not synchronised: the engine's mutex guards it.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "value.hpp"

namespace kbtp::store {

class Extents {
  public:
    struct SizeClass {
        std::vector<u32> extents;  // in no order
        std::vector<u32> open;     // those with free slots, and some that had
        u64 slots = 0, free = 0;
        u32 hand = 0, hand_slot = 0;  // CLOCK's, into `extents`
    };

    Extents(u32 count, u64 extent_bytes);

    u32 slots_in(u32 units) const { return static_cast<u32>(extent_units_ / units); }
    u32 units_most() const { return static_cast<u32>(extent_units_); }

    // The slots that a value of so many units goes into.
    u32 slot_size(u32 units) const;
    // A slot for a value of so many units that costs no other value anything; nothing if there is none.
    std::optional<Place> take(u32 units);
    // How many slots of this size `take` can give.
    u64 available(u32 size) const;
    // At start: the slot is taken. False if there is none like it in that extent.
    bool restore(Place place, u32 units);
    void end_restore();  // after the last of them, before anything else
    void own(Place place, u32 number) { extents_[place.extent].owners[place.slot] = number; }
    void give_back(Place place);

    u32 units(u32 extent) const { return extents_[extent].units; }
    void pin(u32 extent) { ++extents_[extent].pins; }
    void unpin(u32 extent) { --extents_[extent].pins; }
    void warm(u32 extent, u64 bytes);

    SizeClass* size_class(u32 units);
    // The coldest extent of a class, or (of_class false) of all other classes, that nothing reads or writes; kNone if there is none.
    u32 coldest(u32 units, bool of_class);
    bool is_colder(u32 extent, u32 than, u64 factor);
    // Nothing new comes into this extent, so that it can be emptied; returns the values in it.
    std::vector<u32> begin_drain(u32 extent);
    // What is left of it, if anything, is open to new values again.
    void end_drain(u32 extent);
    // CLOCK's next slot in a class that has extents: the value in it, or kNone.
    u32 next_in(SizeClass& size_class);

    u64 free_extents() const { return free_.size(); }
    u64 count() const { return extents_.size(); }
    const std::map<u32, SizeClass>& classes() const { return classes_; }
    u64 memory_bytes() const;
    void check_integrity() const;

  private:
    struct Extent {
        u32 units = 0;  // of a slot; 0: bound to no class
        u32 slots = 0, free = 0, pins = 0;
        u32 first_word = 0;  // no free slot in the words before it
        u32 place_in_class = 0;
        bool is_open = false;  // listed in its class's `open`
        bool is_draining = false;
        u64 heat = 0, heat_epoch = 0, last_used = 0;
        std::vector<u64> free_slots;  // one bit each
        std::vector<u32> owners;
    };

    void bind(u32 extent, u32 units);
    void unbind(u32 extent);
    u32 take_slot(u32 extent);
    std::optional<Place> take_open(u32 units);
    void open(u32 extent);
    u64 heat(Extent& extent) const;

    const u64 extent_units_, epoch_bytes_;
    std::vector<Extent> extents_;
    std::vector<u32> free_;
    std::map<u32, SizeClass> classes_;
    u64 used_bytes_ = 0;  // read and written, ever: the clock of warmth
};

}  // namespace kbtp::store

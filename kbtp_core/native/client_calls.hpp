// A store client's calls in their usual case, each in one call of native code: gets of values that are in the store's memory, and puts of
// values that travel inside their messages or have pieces of one size. What is out of the ordinary is left to store/link.py.
//
// A get is LOADs of what is remembered. Where something is not, it is GETs, and LOADs of what those have not brought.
//
// Rules:
// 1. One call at a time; see whole_call.hpp.
// 2. When a call is over nothing touches the caller's memory: a batch without an end is abandoned, and its region closed, before that.
// 3. Handles for puts are a share of the session's that is used here alone. They come back only from a put that was wholly answered OK;
//    the others are told to the caller, who knows what to do about them.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "handle_cache.hpp"
#include "whole_call.hpp"

namespace kbtp {

// n values in p pieces each, somewhere in memory.
struct ValuePlaces {
    std::span<const u64> addresses;  // n * p
    std::span<const u32> lengths;    // n * p
    std::size_t count = 0;

    std::size_t pieces() const { return count ? addresses.size() / count : 0; }
    u64 total(std::size_t value) const;
    bool has_equal_pieces() const;
};

struct StoreOptions {
    u64 tenant;
    u32 inline_bytes, block_bytes, publish_items, get_items, lookup_items;  // the last three: of one message
};

class ClientCalls {
  public:
    using Result = WholeCall::Result;

    ClientCalls(std::shared_ptr<QueuePair> pair, std::shared_ptr<HandleCache> cache, StoreOptions options, std::vector<u64> handles);
    ~ClientCalls() { give_up(); }

    // The cache is looked at and changed in these, which the interpreter's lock orders.
    bool prepare_lookup(std::span<const u8> ids, u32 flags);
    bool prepare_get(std::span<const u8> ids, const ValuePlaces& places);
    // Behind the `done` of GETs (`is_asking`): whether LOADs have to follow; `refused` if a value is somewhere else than in memory.
    bool is_asking() const { return is_asking_; }
    std::optional<Result> settle_gets(std::span<const u8> ids, const ValuePlaces& places);
    bool prepare_put(std::span<const u8> ids, const ValuePlaces& places, u32 flags);

    // Without that lock, behind one of the three above. `resume` again as long as it is interrupted.
    Result begin();
    Result resume(TimePoint until);

    // The call gets no further: what came of it until now is its result.
    void give_up();

    // When a call is over, with the interpreter's lock. The status of each value (RequestBatch::kNoStatus where there is no answer) and its
    // length. A value that is not where it was is forgotten, and the result is `refused`: look it up.
    Result finish_get(std::span<const u8> ids, const ValuePlaces& places, std::vector<u16>& statuses, std::vector<std::int64_t>& lengths);
    // Octets of each value, 0 where there is none. False: not all was answered.
    bool finish_lookup(std::span<const u8> ids, std::vector<std::int64_t>& lengths);
    // What became of each value. Whether all are stored: if not, `used` are its handles, which are not used here any more.
    bool finish_put(std::span<const u8> ids, std::vector<PutResult>& results, std::vector<u64>& used);

  private:
    static constexpr u64 kDeskBytes = 32 * 1024;

    u32 next_sequence() { return kCallSequences | (next_sequence_++ & kSequenceMask); }
    bool make_sink(const ValuePlaces& places);
    void make_loads();
    u32 sink() const { return (uses_desk_ ? desk_region_ : region_)->stag(); }
    void expose(const ValuePlaces& places, u8 rights);
    void close_region();
    void scatter(std::size_t value, u64 size, const ValuePlaces& places) const;

    const std::shared_ptr<QueuePair> pair_;
    const std::shared_ptr<HandleCache> cache_;
    const StoreOptions options_;
    std::vector<u64> handles_, used_;
    u32 next_sequence_ = 0;
    WholeCall call_;
    std::shared_ptr<RequestBatch> batch_;  // the next to begin
    RegionPtr region_;                     // over the caller's memory
    // Registered memory for small values, which costs less than to register theirs.
    std::vector<u8> desk_;
    RegionPtr desk_region_;
    u64 stride_ = 0;
    bool uses_desk_ = false, is_asking_ = false;
    // Of the get under way: where each value is, as far as that is known; what became of it; and which ones the LOADs under way are for.
    std::vector<LoadRequest> requests_;
    std::vector<std::pair<u16, u32>> found_;  // status and octets
    std::vector<std::size_t> loaded_;
};

}  // namespace kbtp

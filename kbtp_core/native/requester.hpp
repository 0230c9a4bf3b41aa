// The requester: the executor's counterpart on the initiator. It sends a batch of LOADs and matches their answers without the
// interpreter, so that a batch costs the caller one call and one completion, whatever its length.
//
// What is out of the ordinary is not decided here. A COMPLETION that matches no outstanding LOAD of a batch goes up like any other
// message, and the software initiator judges it.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "types.hpp"

namespace kbtp {

// Mirrors LOAD_RESULT of fabric/api.py.
struct LoadResult {
    u16 status, generation;
    u32 data_length;
    u64 block_offset;
    u32 checksum, reserved;
};
static_assert(sizeof(LoadResult) == 24);

// Where the data of an outstanding LOAD goes: the peer's first Write for it is foretold by this.
struct ExpectedWrite {
    u32 sequence, index, stag;
    u64 offset;
    u32 length;
};

struct LoadRequest {
    u64 handle, offset;
    u32 length;
    u16 generation;
};

// One batch. Guarded by the transmit lock of its queue pair; results may be read freely once the batch is reported.
class LoadBatch {
  public:
    static constexpr std::size_t kRequest = 40, kAnswer = 40;
    static constexpr u16 kNoStatus = 0xffff;

    LoadBatch(u32 sequence, u32 stag, u16 flags, std::vector<LoadRequest> requests);

    u32 sequence() const { return sequence_; }
    u64 count() const { return results_.size(); }
    u64 failed() const { return failed_; }  // answers other than OK
    bool has_unsent() const { return next_ < requests_.size(); }
    u64 unsent() const { return requests_.size() - next_; }
    bool is_done() const { return !has_unsent() && outstanding_ == 0; }
    bool is_abandoned() const { return abandoned_; }
    const std::vector<LoadResult>& results() const { return results_; }

    // Write the next request's 40 octets; returns where its data will go.
    ExpectedWrite encode_next(u8* out);
    // Take an answer; false if it is to no outstanding request of this batch.
    bool settle(std::span<const u8, kAnswer> answer);
    // Send nothing more, keep no more results; what is outstanding is still waited for.
    void abandon();

    // The sequence number that an answer names, if it is a COMPLETION at all.
    static bool is_completion(std::span<const u8, kAnswer> answer) { return answer[0] == 1 && answer[1] == 8; }
    static u32 sequence_of(std::span<const u8, kAnswer> answer) { return load_be<u32>(answer.data() + 4); }
    static u32 index_of(std::span<const u8, kAnswer> answer) { return load_be<u32>(answer.data() + 8); }

  private:
    const u32 sequence_, stag_;
    const u16 flags_;
    std::vector<LoadRequest> requests_;
    std::vector<LoadResult> results_;
    std::vector<bool> waiting_;
    std::size_t next_ = 0, outstanding_ = 0, failed_ = 0;
    bool abandoned_ = false;
};

}  // namespace kbtp

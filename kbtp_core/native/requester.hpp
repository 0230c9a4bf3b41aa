// The requester: the executor's counterpart on the initiator. It sends a batch of requests and matches their answers without the
// interpreter, so that a batch costs the caller one call and one completion, whatever its length.
//
// What is out of the ordinary is not decided here. An answer that matches no outstanding request of a batch goes up like any other
// message, and the software initiator judges it.
#pragma once

#include <array>
#include <memory>
#include <optional>
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

// One message on its way: written to where the caller said, or [at, at + length) of `octets`.
struct Outgoing {
    u32 length;
    std::shared_ptr<const std::vector<u8>> octets{};
    u64 at = 0;
    std::optional<ExpectedWrite> write{};
};

// One batch. Guarded by the transmit lock of its queue pair; results may be read freely once the batch is reported.
class RequestBatch {
  public:
    static constexpr std::size_t kHeader = 24, kCompletion = 40, kLongest = 64;
    static constexpr u16 kNoStatus = 0xffff;
    // In the low half of a Request ID: it is a message of a MessageBatch, whose answer need not be a COMPLETION.
    static constexpr u32 kIsMessage = 0x8000'0000;

    RequestBatch(u32 sequence, std::size_t count) : sequence_(sequence), limit_(count), waiting_(count) {}
    virtual ~RequestBatch() = default;

    u32 sequence() const { return sequence_; }
    u64 count() const { return waiting_.size(); }
    u64 failed() const { return failed_; }  // COMPLETIONs other than OK
    bool has_unsent() const { return next_ < limit_; }
    u64 unsent() const { return limit_ - next_; }
    bool is_done() const { return !has_unsent() && outstanding_ == 0; }
    bool is_abandoned() const { return abandoned_; }

    // The next request; if it is short, in `out`, which has room for kLongest octets.
    Outgoing take_next(u8* out);
    // Take an answer; false if it is to no outstanding request of this batch.
    bool settle(std::span<const u8> answer);
    // Send nothing more, keep no more results; what is outstanding is still waited for.
    void abandon();

    // Whether a message can be an answer to a request of some batch at all.
    static bool may_answer(std::span<const u8> m) {
        if (m.size() < kHeader || m[0] != 1) return false;
        return (m[1] == 8 && m.size() == kCompletion) || (m[1] >= 0x80 && is_message(m));
    }
    static bool is_message(std::span<const u8> answer) { return load_be<u32>(answer.data() + 8) & kIsMessage; }
    // The sequence number and the place in the batch that an answer names.
    static u32 sequence_of(std::span<const u8> answer) { return load_be<u32>(answer.data() + 4); }
    static u32 index_of(std::span<const u8> answer) { return load_be<u32>(answer.data() + 8) & ~kIsMessage; }

  protected:
    virtual Outgoing encode(std::size_t index, u8* out) = 0;
    // Nothing if this is no answer to that request; else its status.
    virtual std::optional<u16> keep(std::size_t index, std::span<const u8> answer) = 0;

    const u32 sequence_;

  private:
    std::size_t next_ = 0, limit_, outstanding_ = 0, failed_ = 0;
    std::vector<bool> waiting_;
    bool abandoned_ = false;
};

class LoadBatch : public RequestBatch {
  public:
    LoadBatch(u32 sequence, u32 stag, u16 flags, std::vector<LoadRequest> requests);
    const std::vector<LoadResult>& results() const { return results_; }

  private:
    Outgoing encode(std::size_t index, u8* out) override;
    std::optional<u16> keep(std::size_t index, std::span<const u8> answer) override;

    const u32 stag_;
    const u16 flags_;
    const std::vector<LoadRequest> requests_;
    std::vector<LoadResult> results_;
};

// Messages that are encoded already, one behind the other in `octets`. Their answers are kept as they come.
class MessageBatch : public RequestBatch {
  public:
    MessageBatch(u32 sequence, std::shared_ptr<const std::vector<u8>> octets, std::vector<u32> lengths);
    // The answer to each, empty where none came.
    const std::vector<std::vector<u8>>& answers() const { return answers_; }

    static u64 request_id(u32 sequence, u64 index) { return u64{sequence} << 32 | kIsMessage | index; }

  private:
    Outgoing encode(std::size_t index, u8* out) override;
    std::optional<u16> keep(std::size_t index, std::span<const u8> answer) override;

    const std::shared_ptr<const std::vector<u8>> octets_;
    std::vector<u64> starts_;  // one more than messages
    std::vector<std::vector<u8>> answers_;
};

// Values for a keyed store (docs/store-protocol.md): ALLOC_STOREs, and behind those of each PUBLISH the PUBLISH itself. Value i has
// `pieces` consecutive addresses and lengths. Values up to `inline_bytes` go inside their messages; longer ones are read by the target at
// `offsets[i]` of `stag`.
struct PutRequest {
    u64 tenant;
    u32 flags, inline_bytes, values_each, stag;  // flags, and values, of a PUBLISH
    std::span<const u8> ids;                     // 16 octets each
    std::span<const u64> handles, addresses, offsets;
    std::span<const u32> lengths;
    std::size_t pieces;
};

// Mirrors PUT_RESULT of fabric/api.py: what ALLOC_STORE and PUBLISH were answered, and where the store has the value.
struct PutResult {
    u64 handle;
    u16 stored, status, generation, reserved;
};
static_assert(sizeof(PutResult) == 16);

// Nothing if a value is too long to go inside its message, and there is no region to read it from.
std::shared_ptr<MessageBatch> make_puts(u32 sequence, const PutRequest& request);
std::vector<PutResult> put_results(const MessageBatch& batch, std::size_t count, u32 values_each);

// Mirrors LOOKUP_RESULT of fabric/api.py.
struct LookupResult {
    u64 handle;
    u16 generation;
    u8 tier, flags;
    u32 data_length;
};
static_assert(sizeof(LookupResult) == 16);

// LOOKUPs of `ids`, 16 octets each, `values_each` in one message. What was found: absent where nothing was answered, and behind the first
// absent one of a prefix.
std::shared_ptr<MessageBatch> make_lookups(u32 sequence, u64 tenant, u32 flags, u32 values_each, std::span<const u8> ids);
// GETs: the same, and value i may be written at `offsets[i]` of `stag`, in up to `rooms[i]` octets, before the answer.
std::shared_ptr<MessageBatch> make_gets(u32 sequence, u64 tenant, u32 flags, u32 values_each, std::span<const u8> ids, u32 stag,
                                        std::span<const u64> offsets, std::span<const u32> rooms);
std::vector<LookupResult> lookup_results(const MessageBatch& batch, std::size_t count, u32 values_each, bool is_prefix);

}  // namespace kbtp

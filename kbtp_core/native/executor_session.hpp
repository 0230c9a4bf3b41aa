// What the executor has in progress for one session, without sockets: the transport asks what to do with a message and does it.
//
// An operation is *unsettled* while its effect depends on something under way: a store until its data has been read from the initiator,
// a load of an unsealed block until its octets have left. Requests that name one handle take effect in the order sent (kbtp-completion.md,
// session rules), so:
// 1. Nothing is run here for a handle that has an unsettled operation.
// 2. What is not run here while operations are unsettled reaches the software target only once all of them have settled; and what comes
//    behind it goes the same way, for nothing is run here while the software target has unanswered messages of the session.
// 3. A PUBLISH that names handles of stores under way is parked until they have settled. Until then its handles count as unsettled, too.
// 4. A request with the Request ID of an unsettled store, or of a parked PUBLISH, is malformed and not run.
//
// One caller at a time.
#pragma once

#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "keyed_session.hpp"

namespace kbtp {

struct Work {
    enum class Kind : u8 {
        load,    // RDMA Write [block_offset, + length) of the pool to (stag, offset), then send `answer`; `load_sent` when it has left
        read,    // `store_asked`, RDMA Read (stag, offset, length) into the pool at block_offset, `store_arrived`
        answer,  // send `answer`
        parked,  // nothing yet: `unpark` will have the answer
    } kind;
    u8 opcode = 0;  // of the request; 0 if it was refused
    u64 entry = 0, block_offset = 0;
    u32 length = 0, stag = 0;
    u64 offset = 0;
    bool invalidate = false;  // the answer is a Send with Invalidate of `stag`
    bool snapshot = false;    // the block may change while it is sent
    Answer answer{};
    std::shared_ptr<const std::vector<u8>> octets{};  // the answer to a keyed message, instead
    struct Part {
        u64 entry, block_offset, offset;
        u32 length;
    };
    std::vector<Part> parts{};  // of a GET: Writes to `stag` before the answer, with a `load_sent` each
};

class ExecutorSession {
  public:
    // Without a grant, or without a pool of the executor's, only LOADs are run. `pool_bytes` is the length of the pool's region.
    ExecutorSession(std::shared_ptr<Executor> executor, std::optional<StoreGrant> grant, u64 pool_bytes)
        : executor_(std::move(executor)), grant_(executor_->has_pool() ? grant : std::nullopt), pool_bytes_(pool_bytes) {}

    // This is the beginning of the message after the one that `take` is about to see.
    void foresee(std::span<const u8> message) const {
        if (message.size() >= kHeader) executor_->expect(load_be<u64>(&message[12]));
    }
    // A message has arrived whole. Nothing: it is for the software target. `is_up`: the software target has unanswered messages of this
    // session. `may_read`: the peer answers RDMA Reads.
    std::optional<Work> take(std::span<const u8> message, bool is_up, bool may_read);
    // The RDMA Read of a store is about to be sent: from now on its block may hold octets of the initiator's.
    void store_asked(u64 entry) { unsettled_.at(entry).is_asked = true; }
    // The octets of a load have left, or never will.
    void load_sent(u64 entry, bool is_snapshot);
    // The data of a store is in its block: what to answer.
    Work store_arrived(u64 entry);
    // After something has settled, until it returns nothing: a PUBLISH that waited for nothing else.
    std::optional<Work> unpark();
    // The connection is gone and touches no memory any more.
    void give_up();

    bool has_unsettled() const { return !unsettled_.empty() || !parked_.empty(); }
    // Stores whose data has not come yet.
    u64 stores_under_way() const { return store_ids_.size() - parked_.size(); }

  private:
    struct Unsettled {
        std::optional<Request> store;  // else a load
        u64 block_offset = 0;
        bool is_asked = false;  // its RDMA Read was sent
    };

    std::optional<Work> load(const Request& request);
    std::optional<Work> store(const Request& request, bool may_read);
    std::optional<Work> alloc_store(const Request& request, bool may_read);
    std::optional<Work> free(const Request& request);
    std::optional<Work> keyed(std::span<const u8> message);
    std::optional<Work> get(std::span<const u8> message);
    bool is_unsettled(u64 index) const { return unsettled_.contains(index) || parked_entries_.contains(index); }
    std::optional<Work> duplicate(std::span<const u8> message) const;
    Work read(const Request& request, u64 index, u64 block_offset);
    Work finish(const Request& request, u64 index, u64 block_offset);
    bool is_own(u64 handle) const { return grant_ && handle - grant_->handle_base < grant_->handle_count; }
    bool may_name(u64 index) const;
    bool may_read(u64 index) const;
    bool has_size(const Request& r) const { return r.length > 0 && r.length <= executor_->block_bytes(); }

    const std::shared_ptr<Executor> executor_;
    const std::optional<StoreGrant> grant_;
    const u64 pool_bytes_;
    std::unordered_map<u64, Unsettled> unsettled_;  // by table entry
    std::unordered_set<u64> store_ids_;             // Request IDs of the stores among them, and of what is parked
    std::deque<std::vector<u8>> parked_;            // PUBLISHes, in the order sent
    std::unordered_multiset<u64> parked_entries_;   // that they name
    u64 writing_count_ = 0;                         // blocks whose octets have not left yet
    static constexpr u64 kMostWriting = 1024;       // beyond that the values of a GET are left to LOADs, which are bounded
};

}  // namespace kbtp

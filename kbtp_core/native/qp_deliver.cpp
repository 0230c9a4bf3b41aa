// What happens when a message has arrived whole: delivery to the ULP, answers to Reads and atomics, the executor, and the Terminate.
// Everything here runs under progress_mutex_.
#include <algorithm>

#include "crc32c.hpp"
#include "device.hpp"

namespace kbtp {
namespace {

constexpr double kTerminateLinger = 1.0;  // how long the peer has to read our Terminate and close

// RFC 7306 section 5: each 1 in the mask is the top bit of a field, whose carry out is dropped. The closed form of the RFC's loop.
u64 masked_add(u64 old, u64 add, u64 mask) { return ((old & ~mask) + (add & ~mask)) ^ ((old ^ add) & mask); }

// On the 64-bit word in the memory's own byte order; atomic against everybody in this process. Returns the value before.
u64 run_atomic(u8* address, const wire::AtomicRequest& r) {
    auto* word = reinterpret_cast<u64*>(address);
    u64 old = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    for (;;) {
        u64 next = old;
        if (r.code == wire::kFetchAdd)
            next = masked_add(old, r.operand, r.mask);
        else if (((r.compare ^ old) & r.compare_mask) == 0)
            next = (old & ~r.mask) | (r.operand & r.mask);
        if (__atomic_compare_exchange_n(word, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return old;
    }
}

std::span<const u8> untagged_payload(const u8* frame) {
    constexpr u32 head = wire::kLengthField + wire::kUntaggedHeader;
    return {frame + head, load_be<u16>(frame) - std::size_t{wire::kUntaggedHeader}};
}

}  // namespace

void QueuePair::deliver_send(const wire::Segment& s, const u8* payload) {
    namespace op = wire::opcode;
    const bool invalidates = s.opcode == op::send_invalidate || s.opcode == op::send_se_invalidate;
    // Before the ULP is told (RFC 5040 section 5.3).
    if (invalidates && !invalidate_for_peer(s)) return;
    Completion c{inbound_->buffer.request.wr_id, number_, Op::receive, Status::ok, 0, inbound_->received, 0, 0};
    if (s.opcode == op::immediate || s.opcode == op::immediate_se) {
        c.op = Op::receive_immediate;
        c.value = load_be<u64>(payload);
    }
    if (s.opcode == op::send_se || s.opcode == op::send_se_invalidate || s.opcode == op::immediate_se)
        c.flags |= completion_flag::solicited;
    if (invalidates) {
        c.flags |= completion_flag::invalidated;
        c.stag = s.stag;
    }
    inbound_.reset();
    ++expected_send_msn_;
    if (has_executor_) {
        std::scoped_lock lock(tx_mutex_, rq_mutex_);
        ++upcalls_;
        if (executor_->has_unsettled()) return withheld_.push_back(c);
    }
    push_later(c);
}

bool QueuePair::invalidate_for_peer(const wire::Segment& s) {
    const RegionPtr region = device_->regions().find(s.stag);
    if (!region || region->pd() != pd_ || !region->has(access::remote_invalidate) || !region->is_valid()) {
        fail(wire::error::rdmap_cannot_invalidate);
        return false;
    }
    device_->regions().remove(region);
    return true;
}

void QueuePair::on_read_response(const wire::Segment& s, u32 n) {
    std::lock_guard lock(tx_mutex_);
    outstanding_.front().received += n;
    if (s.last) request_answered(Status::ok, 0);
}

std::optional<wire::TerminateCode> QueuePair::check_source(u32 stag, u64 offset, u64 size, u8 right, RegionPtr& out) const {
    out = device_->regions().find(stag);
    if (!out || !out->is_valid()) return wire::error::rdmap_invalid_stag;
    if (out->pd() != pd_) return wire::error::rdmap_other_stream;
    if (!out->has(right)) return wire::error::rdmap_access;
    if (offset + size < offset) return wire::error::rdmap_wrap;
    if (!out->contains(offset, size)) return wire::error::rdmap_bounds;
    return {};
}

void QueuePair::on_read_request(const wire::Segment& s, const u8* payload) {
    const wire::ReadRequest r = wire::decode_read_request(payload);
    ++expected_request_msn_;
    Message m;
    if (r.size > 0) {  // a zero-length Read names nothing (RFC 5040 section 4.4)
        if (const auto wrong = check_source(r.source_stag, r.source_offset, r.size, access::remote_read, m.source)) return fail(*wrong);
    }
    m.header.tagged = true;
    m.header.opcode = wire::opcode::read_response;
    m.header.stag = r.sink_stag;
    m.header.offset = r.sink_offset;
    m.source_offset = r.source_offset;
    m.length = r.size;
    m.snapshot = true;  // its owner may write to it while it is sent
    m.owner = Owner::response;
    wire::encode_segment(s, m.inline_data.data());  // should its source go away meanwhile
    std::copy_n(payload, wire::kReadRequestHeader, m.inline_data.data() + wire::kUntaggedHeader);
    std::lock_guard lock(tx_mutex_);
    ++inbound_requests_;
    replies_.push_back(std::move(m));
    replies_waiting_ = true;
}

void QueuePair::on_atomic_request(const wire::Segment&, const u8* payload) {
    const wire::AtomicRequest r = wire::decode_atomic_request(payload);
    ++expected_request_msn_;
    if (r.code != wire::kFetchAdd && r.code != wire::kCmpSwap) return fail(wire::error::unexpected_opcode);
    RegionPtr region;
    if (const auto wrong = check_source(r.stag, r.offset, 8, access::remote_atomic, region)) return fail(*wrong);
    const Pin pin(region);
    if (!pin) return fail(wire::error::rdmap_invalid_stag);
    u8* address = region->contiguous(r.offset, 8);
    if (!address || reinterpret_cast<std::uintptr_t>(address) % 8 != 0 || r.offset % 8 != 0) return fail(wire::error::stream_catastrophic);
    Message m;
    m.header.opcode = wire::opcode::atomic_response;
    m.header.qn = wire::queue::atomic_response;
    m.length = wire::kAtomicResponseHeader;
    m.owner = Owner::response;
    store_be<u32>(m.inline_data.data(), r.id);
    store_be<u64>(m.inline_data.data() + 4, run_atomic(address, r));
    std::lock_guard lock(tx_mutex_);
    m.header.msn = atomic_response_msn_++;
    ++inbound_requests_;
    replies_.push_back(std::move(m));
    replies_waiting_ = true;
}

void QueuePair::on_atomic_response(const wire::Segment&, const u8* payload) {
    std::unique_lock lock(tx_mutex_);
    ++expected_atomic_msn_;
    if (outstanding_.empty() || !outstanding_.front().is_atomic || outstanding_.front().atomic_id != load_be<u32>(payload)) {
        lock.unlock();
        return fail(wire::error::stream_catastrophic);
    }
    request_answered(Status::ok, load_be<u64>(payload + 4));
}

void QueuePair::on_terminate(const u8* payload, u32 n) {
    wire::TerminateCode code = wire::error::rdmap_unspecified;
    if (payload && n >= 2) code = {static_cast<u8>(payload[0] >> 4), static_cast<u8>(payload[0] & 15), payload[1]};
    ++stats_.terminates_received;
    stats_.terminate_received = code.packed();
    {
        std::lock_guard lock(tx_mutex_);
        // Requests are served in order, so a remote protection error is about the oldest.
        if (code.layer == 0 && code.type == 1 && !outstanding_.empty()) request_answered(Status::remote_access, 0);
    }
    end(code.packed(), completion_flag::remote, Status::ok);
}

// Whether a Send can be an answer to a request of the requester. Its CRC was good.
bool QueuePair::may_be_answer(const wire::Segment& s, const u8* payload, u32 n) const {
    if (!has_requester_ || s.tagged || !s.last || s.offset != 0 || inbound_ || s.msn != expected_send_msn_) return false;
    if (check_kind(s) || (s.opcode != wire::opcode::send && s.opcode != wire::opcode::send_se)) return false;
    return RequestBatch::may_answer({payload, n});
}

// The LOAD that this answers wants no data any more.
void QueuePair::forget_foretold(std::span<const u8> answer) {
    if (RequestBatch::is_message(answer)) return;
    const u32 sequence = RequestBatch::sequence_of(answer), index = RequestBatch::index_of(answer);
    for (int look = 0; look < 2; ++look, foretell())
        for (std::size_t i = 0; i < foretold_.size(); ++i)  // the oldest, usually; a target may answer in any order
            if (foretold_[i].sequence == sequence && foretold_[i].index == index)
                return i == 0 ? foretold_.pop_front() : foretold_.erase(i);
}

// Take over what the transmit half has asked for since.
void QueuePair::foretell() {
    std::lock_guard lock(tx_mutex_);
    for (; !expected_writes_.empty(); expected_writes_.pop_front()) foretold_.push_back(std::move(expected_writes_.front()));
}

// Leave the fast path: let go of the memory that Writes went to, and match the answers that were put aside. Before anything else is done
// with a frame, and before what was read is forgotten.
void QueuePair::settle_answers() {
    if (pinned_) {
        crc32c_copy_fence();
        pinned_->unpin();
        pinned_.reset();
    }
    if (answers_.empty()) return;
    expected_send_msn_ -= static_cast<u32>(answers_.size());  // counted again one by one
    for (std::size_t i = 0; i < answers_.size(); ++i) {
        {
            std::lock_guard lock(tx_mutex_);
            while (i < answers_.size() && take_answer(untagged_payload(answers_[i]))) ++i;
        }
        if (i < answers_.size() && is_open() && state_.load() != State::terminating) hand_up(answers_[i]);
    }
    answers_.clear();
}

// An answer to no request of the requester is a message like any other.
void QueuePair::hand_up(const u8* frame) {
    frame_ = frame;
    frame_ulpdu_ = load_be<u16>(frame);
    const wire::Segment segment = wire::decode_segment(frame + wire::kLengthField);
    const auto payload = untagged_payload(frame);
    const u32 n = static_cast<u32>(payload.size());
    const auto at = admit(segment, n);
    if (at && place(segment, *at, payload.data(), n)) placed(segment, payload.data(), n);
}

// With tx_mutex_ held. The receive buffer that the answer would have used stays posted. False: it answers nothing that was asked.
bool QueuePair::take_answer(std::span<const u8> answer) {
    const auto found = loads_.find(RequestBatch::sequence_of(answer));
    if (found == loads_.end() || !found->second->settle(answer)) return false;
    ++expected_send_msn_;
    ++stats_.messages_received;
    replies_waiting_ = replies_waiting_ || !load_queue_.empty();
    if (answered(found->second)) push_later({found->first, number_, Op::loads, Status::ok, 0, 0, 0, 0});
    if (found->second->is_done()) loads_.erase(found);
    return true;
}

// With tx_mutex_ held: one request of the batch is answered. Whether that is to be reported, for it was the last.
bool QueuePair::answered(const std::shared_ptr<RequestBatch>& batch) {
    --loads_outstanding_;
    return batch->is_done() && !batch->is_abandoned();
}

bool QueuePair::settle(std::span<const u8> answer) {
    std::lock_guard lock(tx_mutex_);
    if (!RequestBatch::may_answer(answer)) return false;
    const auto found = loads_.find(RequestBatch::sequence_of(answer));
    if (found == loads_.end() || !found->second->settle(answer)) return false;
    if (answered(found->second)) {
        const Completion done{found->first, number_, Op::loads, Status::ok, 0, 0, 0, 0};
        cq_->push({&done, 1});
    }
    if (found->second->is_done()) loads_.erase(found);
    if (!write_armed_) pump_and_arm(0);
    return true;
}

// Run a plain request here (draft section 8). The receive buffer that it would have used stays posted.
bool QueuePair::execute(const wire::Segment& s, const u8* payload, u32 n) {
    if (!has_executor_ || s.tagged || !s.last || s.offset != 0 || inbound_ || s.msn != expected_send_msn_) return false;
    if (check_kind(s) || (s.opcode != wire::opcode::send && s.opcode != wire::opcode::send_se)) return false;
    std::lock_guard lock(tx_mutex_);
    if (!execute_whole({payload, n}, 0)) return false;
    ++stats_.messages_received;
    return true;
}

// The same for a message of several segments, which is whole in its receive buffer now. That buffer is the next one again.
bool QueuePair::execute_received(const wire::Segment& s) {
    if (!has_executor_ || s.offset == 0 || (s.opcode != wire::opcode::send && s.opcode != wire::opcode::send_se)) return false;
    const Receive buffer = inbound_->buffer;
    const u8* message = buffer.region ? buffer.region->contiguous(buffer.request.offset, inbound_->received) : nullptr;
    const BorrowedPin pin(buffer.region.get());
    if (!message || !pin) return false;
    std::lock_guard lock(tx_mutex_);
    if (!execute_whole({message, inbound_->received}, 1)) return false;
    inbound_.reset();
    std::lock_guard receives(rq_mutex_);
    receive_queue_.push_front(buffer);
    return true;
}

// With tx_mutex_ held. `taken` receive buffers are out of their queue for this message.
bool QueuePair::execute_whole(std::span<const u8> message, std::size_t taken) {
    bool is_up = false;
    {
        std::lock_guard receives(rq_mutex_);
        is_up = upcalls_ > 0;
        // What is posted bounds what a peer may have outstanding, here as there.
        if (receive_queue_.size() + taken <= executor_replies_) return false;
    }
    const auto work = executor_->take(message, is_up, ord_ > 0);
    if (!work) return false;
    ++expected_send_msn_;
    ++executor_replies_;
    execute(*work);
    return true;
}

// With tx_mutex_ held.
void QueuePair::execute(const Work& work) {
    replies_waiting_ = true;
    if (work.kind == Work::Kind::parked) return;
    if (work.kind == Work::Kind::read) return stores_.push_back(work);
    const auto write = [&](const Work::Part& part) {
        ++stats_.executed_loads;
        Message data;
        data.header.tagged = true;
        data.header.opcode = wire::opcode::write;
        data.header.stag = work.stag;
        data.header.offset = part.offset;
        data.source = pool_;
        data.source_offset = part.block_offset;
        data.length = part.length;
        data.snapshot = work.snapshot;
        data.owner = Owner::executor_write;
        data.owner_id = part.entry;
        replies_.push_back(std::move(data));
    };
    if (work.kind == Work::Kind::load) write({work.entry, work.block_offset, work.offset, work.length});
    for (const Work::Part& part : work.parts) write(part);
    stats_.executed_frees += work.opcode == opcode::free;
    stats_.executed_keyed += work.octets != nullptr;
    stats_.executed_stores += work.opcode == opcode::store || work.opcode == opcode::alloc_store;
    Message answer;
    answer.header.opcode = work.invalidate ? wire::opcode::send_invalidate : wire::opcode::send;
    answer.header.stag = work.invalidate ? work.stag : 0;
    answer.octets = work.octets;
    answer.length = work.octets ? static_cast<u32>(work.octets->size()) : kAnswer;
    std::copy(work.answer.begin(), work.answer.end(), answer.inline_data.begin());
    answer.owner = Owner::executor_reply;
    replies_.push_back(std::move(answer));
}

// With tx_mutex_ held: an operation of the executor has settled. Once all have, the software target hears of what came behind them.
void QueuePair::settled() {
    while (const auto unparked = executor_->unpark()) execute(*unparked);
    if (executor_->has_unsettled() || withheld_.empty()) return;
    cq_->push(withheld_);
    withheld_.clear();
}

// The peer broke a rule: say so with a Terminate, send nothing after it, and read away what still comes.
void QueuePair::fail(wire::TerminateCode code) {
    const State s = state_.load();
    if (s == State::terminating || s == State::dead) return;
    direct_.active = false;
    if (is_passive_ && !seen_frame_) return end(code.packed(), 0, Status::ok);

    wire::Quoted quoted;
    const bool quotes = frame_ && code.layer != 2 && !(code.layer == 0 && code.type == 0);
    if (quotes) {
        const u8* body = frame_ + wire::kLengthField;
        const u32 header = wire::is_tagged(body[0]) ? wire::kTaggedHeader : wire::kUntaggedHeader;
        quoted.ulpdu_length = static_cast<u16>(frame_ulpdu_);
        quoted.ddp_header = {body, header};
        const bool is_read = (body[1] & 15) == wire::opcode::read_request && frame_ulpdu_ == header + wire::kReadRequestHeader;
        if (code.layer == 0 && code.type == 1 && is_read) quoted.rdma_header = {body + header, wire::kReadRequestHeader};
    }
    const std::vector<u8> payload = wire::encode_terminate(code, quoted);
    Message m;
    m.header.opcode = wire::opcode::terminate;
    m.header.qn = wire::queue::terminate;
    m.header.msn = 1;
    m.length = static_cast<u32>(payload.size());
    std::copy(payload.begin(), payload.end(), m.inline_data.begin());
    m.owner = Owner::terminate;

    std::lock_guard lock(tx_mutex_);
    state_.store(State::terminating);
    terminate_value_ = code.packed();
    // What is left of the current message is never sent, but frames of it may be in the burst that the socket still has to take: its
    // memory is let go with that burst, not now.
    if (current_ && (current_->owner == Owner::executor_write || current_->octets)) burst_.finished.push_back(std::move(*current_));
    current_.reset();
    terminate_ = std::move(m);
    set_deadline(kTerminateLinger);
    if (!write_armed_) pump_and_arm(0);
}

}  // namespace kbtp

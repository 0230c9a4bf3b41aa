// The transmit half: from posted requests to frames on the socket. Everything here runs under tx_mutex_, on the progress thread
// or on the thread that posted.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <utility>

#include "crc32c.hpp"
#include "device.hpp"

namespace kbtp {
namespace {

// A burst is what one sendmsg is given: enough frames to make the call worth it, few enough that the CRC of the next burst is
// computed while the peer takes this one.
constexpr std::size_t kBurstBytes = 64 * 1024, kBurstFrames = 64, kBurstPieces = 512;
// Payloads up to this are copied beside their header: one piece instead of three, and nothing can change under the CRC.
constexpr u32 kCopyPayload = 256;
constexpr std::size_t kFrameArena = wire::kLengthField + wire::kUntaggedHeader + kCopyPayload + 3 + wire::kCrcField;
// What the thread that posts sends itself before it leaves the rest to the progress thread.
constexpr std::size_t kInlineBudget = 512 * 1024;
constexpr std::size_t kEventBudget = 2 * 1024 * 1024;
constexpr u32 kReadRequestUlpdu = wire::kUntaggedHeader + wire::kReadRequestHeader;

bool is_request(Op op) { return op == Op::read || op == Op::fetch_add || op == Op::cmp_swap; }
bool uses_local_memory(const WorkRequest& r) { return r.length > 0 && (r.op <= Op::read); }

u8 opcode_for(Op op) {
    switch (op) {
        case Op::send:
            return wire::opcode::send;
        case Op::send_invalidate:
            return wire::opcode::send_invalidate;
        case Op::send_se:
            return wire::opcode::send_se;
        case Op::send_se_invalidate:
            return wire::opcode::send_se_invalidate;
        case Op::write:
            return wire::opcode::write;
        case Op::read:
            return wire::opcode::read_request;
        case Op::immediate:
            return wire::opcode::immediate;
        case Op::immediate_se:
            return wire::opcode::immediate_se;
        default:
            return wire::opcode::atomic_request;
    }
}

}  // namespace

QueuePair::Posted QueuePair::post_send(std::span<const WorkRequest> requests) {
    // Regions are looked up before the lock: it is the device's table.
    std::vector<SendEntry> entries;
    entries.reserve(requests.size());
    for (const WorkRequest& r : requests) {
        if (r.op > Op::immediate_se) return Posted::no_such_op;
        SendEntry e{.request = r, .local = nullptr};
        if (uses_local_memory(r)) {
            e.local = device_->regions().find(r.local_stag);
            e.bad_local = !e.local || e.local->pd() != pd_ || !e.local->contains(r.local_offset, r.length) ||
                          (r.op == Op::read && !e.local->has(access::local_write));
        }
        entries.push_back(std::move(e));
    }
    std::lock_guard lock(tx_mutex_);
    const State s = state_.load();
    if (s == State::idle || s >= State::closing || broken_ || finishing_) return Posted::closed;
    // A peer with IRD 0 answers no Reads and no atomics: they would wait for ever.
    if (ord_ == 0 && std::any_of(requests.begin(), requests.end(), [](const WorkRequest& r) { return is_request(r.op); }))
        return Posted::no_requests;
    if (send_queue_.size() + entries.size() > limits_.send_depth) return Posted::full;
    std::move(entries.begin(), entries.end(), std::back_inserter(send_queue_));
    if (!write_armed_) pump_and_arm(kInlineBudget);
    return Posted::ok;
}

void QueuePair::enable_loads(u32 credits) {
    std::lock_guard lock(tx_mutex_);
    load_credits_ = credits;
    has_requester_ = true;
}

QueuePair::Posted QueuePair::post_batch(std::shared_ptr<RequestBatch> batch) {
    std::lock_guard lock(tx_mutex_);
    const State s = state_.load();
    if (s == State::idle || s >= State::closing || broken_ || finishing_) return Posted::closed;
    loads_[batch->sequence()] = batch;
    load_queue_.push_back(std::move(batch));
    if (!write_armed_) pump_and_arm(kInlineBudget);
    return Posted::ok;
}

void QueuePair::abandon_batch(const std::shared_ptr<RequestBatch>& batch) {
    std::lock_guard lock(tx_mutex_);
    std::erase(load_queue_, batch);
    batch->abandon();
    if (batch->is_done()) loads_.erase(batch->sequence());
}

u64 QueuePair::unsent_loads() {
    std::lock_guard lock(tx_mutex_);
    u64 count = 0;
    for (const auto& batch : load_queue_) count += batch->unsent();
    return count;
}

// Make frames and give them to the socket until there is nothing to do, the socket is full, or `budget` octets went out.
QueuePair::Pumped QueuePair::pump(std::size_t budget) {
    if (!may_send_ || broken_ || fd_ < 0) return Pumped::idle;
    for (std::size_t sent = 0;;) {
        if (burst_.empty()) {
            build_burst();
            if (burst_.empty()) return broken_ ? Pumped::broken : Pumped::idle;
        }
        const std::size_t size = burst_.payload_bytes;
        if (const Pumped result = send_burst(); result != Pumped::idle) return result;
        finish_burst();
        sent += size;
        if (sent >= budget) return Pumped::more;
    }
}

void QueuePair::pump_and_arm(std::size_t budget) {
    const Pumped result = pump(budget ? budget : kEventBudget);
    stats_.socket_stalls += result == Pumped::blocked;
    arm_write(result == Pumped::blocked || result == Pumped::more);
    retire();
    if (finishing_ && !fin_sent_ && drained() && fd_ >= 0) {
        fin_sent_ = true;
        socket_finish(capture_.get(), fd_);
    }
    if (fin_sent_ && peer_finished_ && state_.load() == State::closing) later([](QueuePair& self) { self.end(0, 0, Status::ok); });
}

void QueuePair::arm_write(bool wanted) {
    if (wanted == write_armed_ || !in_epoll_) return;
    write_armed_ = wanted;
    watch_socket();
}

void QueuePair::build_burst() {
    burst_.pieces.clear();
    burst_.regions.clear();
    burst_.marked.clear();
    burst_.next = burst_.arena_used = burst_.copy_used = burst_.payload_bytes = burst_.fpdus = 0;
    const auto has_room = [this] {
        return burst_.fpdus < kBurstFrames && burst_.payload_bytes < kBurstBytes && burst_.pieces.size() < kBurstPieces;
    };
    while (!broken_ && (has_room() || ends_with_data())) {
        if (!current_ && !take_next()) break;
        if (!append_segment(*current_)) break;
        if (current_->sent == current_->length) {
            ++stats_.messages_sent;
            burst_.finished.push_back(std::move(*current_));
            current_.reset();
        }
    }
    if (broken_) burst_.pieces.clear();
}

// The data of an executor's answer is in the burst, and the answer, which is short, is not.
bool QueuePair::ends_with_data() const {
    return !current_ && !burst_.finished.empty() && burst_.finished.back().owner == Owner::executor_write;
}

// Choose the message that goes next. A Terminate ends everything; otherwise replies and posted requests take turns.
bool QueuePair::take_next() {
    if (terminate_) {
        current_ = std::move(terminate_);
        terminate_.reset();
        return true;
    }
    if (halted_ || state_.load() == State::terminating) return false;
    for (int turn = 0; turn < 2; ++turn) {
        prefer_replies_ = !prefer_replies_;
        if (prefer_replies_ && !replies_.empty()) {
            current_ = replies_.take_front();
            if (current_->owner == Owner::executor_reply) current_->header.msn = send_msn_++;
            // An executor's reply follows its data without another message between, and both leave in one burst.
            if (current_->owner == Owner::executor_write) prefer_replies_ = false;
            return true;
        }
        if (!prefer_replies_ && (take_work_request() || take_load() || take_store())) return true;
    }
    return false;
}

bool QueuePair::take_work_request() {
    if (sent_to_ == send_base_ + send_queue_.size()) return false;
    SendEntry& e = entry(sent_to_);
    const WorkRequest& r = e.request;
    if (e.bad_local) {
        e.status = Status::local_protection;
        e.state = EntryState::done;
        halt();
        return false;
    }
    if ((r.flags & wr_flag::fence) && !outstanding_.empty()) return false;
    if (is_request(r.op) && outstanding_.size() >= ord_) {
        stats_.ord_stalls += !std::exchange(request_stalls_, true);
        return false;
    }
    request_stalls_ = false;
    Message m = message_for(e);
    m.owner_id = sent_to_;
    if (!m.header.tagged) m.header.msn = is_request(r.op) ? request_msn_++ : send_msn_++;
    if (is_request(r.op)) {
        const bool atomic = r.op != Op::read;
        Outstanding o{sent_to_, atomic, 0, r.local_stag, r.local_offset, r.length, 0, e.local};
        if (atomic) {
            o.atomic_id = next_atomic_id_++;
            wire::encode(wire::AtomicRequest{r.op == Op::fetch_add ? wire::kFetchAdd : wire::kCmpSwap, o.atomic_id, r.remote_stag,
                                             r.remote_offset, r.operand, r.mask, r.op == Op::cmp_swap ? r.compare : 0,
                                             r.op == Op::cmp_swap ? r.compare_mask : ~u64{0}},
                         m.inline_data.data());
        }
        outstanding_.push_back(std::move(o));
        e.state = EntryState::awaiting_response;
    }
    ++sent_to_;
    current_ = std::move(m);
    return true;
}

bool QueuePair::take_load() {
    if (load_queue_.empty() || loads_outstanding_ >= load_credits_) return false;
    Message m;
    m.header.opcode = wire::opcode::send;
    m.header.msn = send_msn_++;
    static_assert(RequestBatch::kLongest == sizeof m.inline_data);
    Outgoing next = load_queue_.front()->take_next(m.inline_data.data());
    m.length = next.length;
    m.octets = std::move(next.octets);
    m.source_offset = next.at;
    m.owner = Owner::load_request;
    if (next.write) expected_writes_.push_back(std::move(*next.write));
    if (!load_queue_.front()->has_unsent()) load_queue_.pop_front();
    ++loads_outstanding_;
    current_ = std::move(m);
    return true;
}

// The RDMA Read of an executor's store.
bool QueuePair::take_store() {
    if (stores_.empty()) return false;
    if (outstanding_.size() >= ord_) {
        stats_.ord_stalls += !std::exchange(store_stalls_, true);
        return false;
    }
    store_stalls_ = false;
    const Work work = stores_.front();
    stores_.pop_front();
    executor_->store_asked(work.entry);
    Message m;
    m.header.opcode = wire::opcode::read_request;
    m.header.qn = wire::queue::request;
    m.header.msn = request_msn_++;
    m.length = wire::kReadRequestHeader;
    m.owner = Owner::executor_read;
    wire::encode(wire::ReadRequest{pool_->stag(), work.block_offset, work.length, work.stag, work.offset}, m.inline_data.data());
    outstanding_.push_back({work.entry, false, 0, pool_->stag(), work.block_offset, work.length, 0, pool_, true});
    current_ = std::move(m);
    return true;
}

// The DDP message of a work request; MSN and atomic header are filled in when it is taken.
QueuePair::Message QueuePair::message_for(const SendEntry& e) {
    const WorkRequest& r = e.request;
    Message m;
    m.header.opcode = opcode_for(r.op);
    switch (r.op) {
        case Op::write:
            m.header.tagged = true;
            m.header.stag = r.remote_stag;
            m.header.offset = r.remote_offset;
            break;
        case Op::read:
            m.header.qn = wire::queue::request;
            m.length = wire::kReadRequestHeader;
            wire::encode(wire::ReadRequest{r.local_stag, r.local_offset, r.length, r.remote_stag, r.remote_offset}, m.inline_data.data());
            return m;
        case Op::fetch_add:
        case Op::cmp_swap:
            m.header.qn = wire::queue::request;
            m.length = wire::kAtomicRequestHeader;
            return m;
        case Op::immediate:
        case Op::immediate_se:
            m.length = wire::kImmediateData;
            store_be<u64>(m.inline_data.data(), r.operand);
            return m;
        case Op::send_invalidate:
        case Op::send_se_invalidate:
            m.header.stag = r.remote_stag;
            break;
        default:
            break;
    }
    m.source = e.local;
    m.source_offset = r.local_offset;
    m.length = r.length;
    m.snapshot = r.flags & wr_flag::snapshot;
    return m;
}

// One frame: [length, DDP header, (small payload)] [payload pieces] [pad, CRC]. The trailer of one frame and the head of the next are
// neighbours in the arena and become one piece. False if the source is gone.
bool QueuePair::append_segment(Message& m) {
    const BorrowedPin pin(m.source.get());
    if (!pin) {
        source_gone(m);
        return false;
    }
    const u32 header = m.header.header_size();
    // RDMAP headers never span segments.
    u32 room = m.source || m.octets ? device_->options().mulpdu - header : static_cast<u32>(m.inline_data.size());
    if (room >= 4096) room &= ~u32{4095};  // whole pages a frame
    const u32 n = std::min(room, m.length - m.sent);
    m.header.last = m.sent + n == m.length;
    if (inserts_markers_) {
        append_marked(m, n);
        return true;
    }

    u8* head = arena_.data() + burst_.arena_used;
    std::size_t used = wire::kLengthField + header;
    store_be<u16>(head, static_cast<u16>(header + n));
    wire::encode_segment(m.header, head + wire::kLengthField);
    const bool is_near = !m.source && (!m.octets || n <= kCopyPayload);  // short, and all in one place
    if (is_near) {
        std::memcpy(head + used, m.own_octets() + m.sent, n);
        used += n;
    }
    u32 crc = sum(0, head, used);

    if (!burst_.pieces.empty() && static_cast<u8*>(burst_.pieces.back().iov_base) + burst_.pieces.back().iov_len == head)
        burst_.pieces.back().iov_len += used;
    else
        burst_.pieces.push_back({head, used});
    if (m.source && n > 0) gather_payload(m, n, head, used, crc);
    if (!m.source && !is_near) {
        burst_.pieces.push_back({const_cast<u8*>(m.own_octets()) + m.sent, n});
        crc = sum(crc, m.own_octets() + m.sent, n);
    }

    u8* tail = head + used;
    const u32 pad = wire::pad_for(header + n);
    if (pad > 0) {
        std::memset(tail, 0, pad);
        crc = sum(crc, tail, pad);
    }
    // The only little-endian field of the protocol (1.5).
    for (int i = 0; i < 4; ++i) tail[pad + i] = static_cast<u8>(crc >> (8 * i));
    const std::size_t trailer = pad + wire::kCrcField;
    if (static_cast<u8*>(burst_.pieces.back().iov_base) + burst_.pieces.back().iov_len == tail)
        burst_.pieces.back().iov_len += trailer;
    else
        burst_.pieces.push_back({tail, trailer});

    burst_.arena_used += used + trailer;
    burst_.payload_bytes += n + used + trailer;
    ++burst_.fpdus;
    ++stats_.fpdus_sent;
    m.header.offset += n;
    m.sent += n;
    return true;
}

// A local source that its owner gave up, or the source of a peer's Read that was invalidated after the request was admitted.
void QueuePair::source_gone(Message& m) {
    if (m.owner == Owner::work_request) {
        entry(m.owner_id).status = Status::local_protection;
        entry(m.owner_id).state = EntryState::done;
        current_.reset();
        halt();
    } else if (m.owner == Owner::response) {
        // The Terminate quotes the Read Request as far as it was served (RFC 5040 section 4.8).
        std::array<u8, wire::kLengthField + kReadRequestUlpdu> frame{};
        std::copy_n(m.inline_data.begin(), kReadRequestUlpdu, frame.begin() + wire::kLengthField);
        u8* header = frame.data() + wire::kLengthField + wire::kUntaggedHeader;
        wire::ReadRequest request = wire::decode_read_request(header);
        request.sink_offset += m.sent;
        request.size -= m.sent;
        request.source_offset += m.sent;
        wire::encode(request, header);
        current_.reset();
        halted_ = true;
        later([frame](QueuePair& self) {
            self.frame_ = frame.data();
            self.frame_ulpdu_ = kReadRequestUlpdu;
            self.fail(wire::error::rdmap_invalid_stag);
            self.frame_ = nullptr;
        });
    } else {
        fail_transmit(0);
    }
}

// A request that its poster got wrong: a Terminate goes out instead of it (RFC 5040 section 7.1), and nothing after that.
void QueuePair::halt() {
    if (halted_) return;
    halted_ = true;
    later([](QueuePair& self) {
        self.frame_ = nullptr;
        self.fail(wire::error::rdmap_catastrophic);
    });
}

// Continue the CRC of a frame. Where neither side wants CRCs the field is there all the same, and zero (RFC 5044 section 4.1).
u32 QueuePair::sum(u32 crc, const void* data, std::size_t size) const { return checks_crc_ ? crc32c_extend(crc, data, size) : 0; }

// Add `n` octets of the message's payload, whose region is pinned, to the burst and to the CRC.
void QueuePair::gather_payload(Message& m, u32 n, u8* head, std::size_t& used, u32& crc) {
    if (m.snapshot && copy_arena_.empty()) copy_arena_.resize(kBurstBytes + wire::kMaxUlpdu);
    const std::size_t first = burst_.pieces.size();
    m.source->gather(m.source_offset + m.sent, n, burst_.pieces);
    u8* copy = n <= kCopyPayload ? head + used : m.snapshot ? copy_arena_.data() + burst_.copy_used : nullptr;
    if (!copy) {
        for (std::size_t i = first; i < burst_.pieces.size() && checks_crc_; ++i) {
            const iovec& piece = burst_.pieces[i];
            const void* next = i + 1 < burst_.pieces.size() ? burst_.pieces[i + 1].iov_base : next_source();
            crc = crc32c_extend_cold(crc, piece.iov_base, piece.iov_len, next);
        }
        if (burst_.regions.empty() || burst_.regions.back() != m.source) burst_.regions.push_back(m.source);
        return;
    }
    u8* at = copy;
    for (std::size_t i = first; i < burst_.pieces.size(); ++i) {
        std::memcpy(at, burst_.pieces[i].iov_base, burst_.pieces[i].iov_len);
        at += burst_.pieces[i].iov_len;
    }
    burst_.pieces.resize(first);
    crc = sum(crc, copy, n);
    if (n <= kCopyPayload) {
        burst_.pieces.back().iov_len += n;
        used += n;
    } else {
        burst_.pieces.push_back({copy, n});
        burst_.copy_used += n;
    }
}

// Where the block lies that is sent after this one, if that is known: replies of the executor come as data, answer, data, answer.
const void* QueuePair::next_source() const {
    if (replies_.size() < 2 || !replies_[1].source || replies_[1].length == 0) return nullptr;
    return replies_[1].source->contiguous(replies_[1].source_offset, 1);
}

QueuePair::Pumped QueuePair::send_burst() {
    while (!burst_.empty()) {
        std::vector<Pin> pins;
        pins.reserve(burst_.regions.size());
        for (const RegionPtr& region : burst_.regions) {
            pins.emplace_back(region);
            if (!pins.back()) {  // invalidated with a frame half sent: the stream cannot go on
                fail_transmit(wire::error::rdmap_invalid_stag.packed());
                return Pumped::broken;
            }
        }
        msghdr message{};
        message.msg_iov = &burst_.pieces[burst_.next];
        message.msg_iovlen = std::min<std::size_t>(burst_.pieces.size() - burst_.next, IOV_MAX);
        ssize_t n = socket_send(capture_.get(), fd_, message);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) return Pumped::blocked;
            fail_transmit(wire::error::tcp_lost.packed());
            return Pumped::broken;
        }
        stats_.bytes_sent += static_cast<u64>(n);
        while (n > 0) {
            iovec& piece = burst_.pieces[burst_.next];
            const std::size_t step = std::min<std::size_t>(piece.iov_len, static_cast<std::size_t>(n));
            piece.iov_base = static_cast<u8*>(piece.iov_base) + step;
            piece.iov_len -= step;
            n -= static_cast<ssize_t>(step);
            if (piece.iov_len == 0) ++burst_.next;
        }
    }
    return Pumped::idle;
}

// The socket has taken the burst: the messages that end in it are done with their memory.
void QueuePair::finish_burst() {
    for (Message& m : burst_.finished) {
        switch (m.owner) {
            case Owner::work_request:
                // A Read may have been answered, and retired, while the rest of its burst waited for the socket.
                if (m.owner_id >= send_base_ && entry(m.owner_id).state == EntryState::queued) entry(m.owner_id).state = EntryState::done;
                break;
            case Owner::response:
                --inbound_requests_;
                break;
            case Owner::executor_write:
                executor_->load_sent(m.owner_id, m.snapshot);
                if (m.snapshot) settled();
                break;
            case Owner::executor_read:
            case Owner::load_request:
            case Owner::ready:
                break;
            case Owner::executor_reply:
                --executor_replies_;
                break;
            case Owner::terminate:
                ++stats_.terminates_sent;
                stats_.terminate_sent = terminate_value_;
                fin_sent_ = true;
                socket_finish(capture_.get(), fd_);
                break;
        }
    }
    burst_.finished.clear();
    burst_.pieces.clear();
    burst_.next = 0;
    burst_.regions.clear();
}

// Report finished requests, oldest first and none past an unfinished one (RFC 5040 section 5.5 rule 15).
void QueuePair::retire() {
    std::vector<Completion> done;
    while (!send_queue_.empty() && send_queue_.front().state == EntryState::done) {
        const SendEntry& e = send_queue_.front();
        if ((e.request.flags & wr_flag::signaled) || e.status != Status::ok)
            done.push_back({e.request.wr_id, number_, e.request.op, e.status, 0, e.request.length, 0, e.value});
        send_queue_.pop_front();
        ++send_base_;
    }
    sent_to_ = std::max(sent_to_, send_base_);  // an entry can fail before it is taken
    cq_->push(done);
}

// The peer has answered the oldest outstanding Read or atomic.
void QueuePair::request_answered(Status status, u64 value) {
    const Outstanding answered = std::move(outstanding_.front());
    outstanding_.pop_front();
    if (!answered.is_executors) {
        SendEntry& e = entry(answered.send_index);
        e.state = EntryState::done;
        e.status = status;
        e.value = value;
    } else if (status == Status::ok) {
        execute(executor_->store_arrived(answered.send_index));
        settled();
    } else {
        return;  // the end of the connection, which undoes it
    }
    if (write_armed_)
        retire();
    else
        pump_and_arm(0);  // a fence or the ORD limit may have opened
}

// The socket or the memory failed under the transmit half: the progress thread ends the pair.
void QueuePair::fail_transmit(u64 value) {
    if (broken_) return;
    broken_ = true;
    later([value](QueuePair& self) { self.end(value, 0, Status::ok); });
}

// Everything that was posted and is not done fails; called once, from `end`.
void QueuePair::flush_queues() {
    std::vector<Completion> flushed;
    for (SendEntry& e : send_queue_) {
        if (e.state != EntryState::done) e.status = Status::flushed;
        if ((e.request.flags & wr_flag::signaled) || e.status != Status::ok)
            flushed.push_back({e.request.wr_id, number_, e.request.op, e.status, 0, 0, 0, e.value});
    }
    send_queue_.clear();
    sent_to_ = send_base_;
    auto release = [&](const Message& m) {
        if (m.owner == Owner::executor_write) executor_->load_sent(m.owner_id, m.snapshot);
    };
    for (const Message& m : burst_.finished) release(m);
    for (std::size_t i = 0; i < replies_.size(); ++i) release(replies_[i]);
    if (current_) release(*current_);
    if (executor_) executor_->give_up();
    stores_.clear();
    burst_ = Burst{};
    replies_.clear();
    current_.reset();
    outstanding_.clear();
    for (const auto& [sequence, batch] : loads_)
        if (!batch->is_abandoned()) flushed.push_back({sequence, number_, Op::loads, Status::flushed, 0, 0, 0, 0});
    loads_.clear();
    load_queue_.clear();
    expected_writes_.clear();
    cq_->push(flushed);
}

}  // namespace kbtp

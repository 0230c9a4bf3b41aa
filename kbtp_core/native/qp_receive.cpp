// The receive half: from the socket to registered memory and to completions. Everything here runs under progress_mutex_.
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "crc32c.hpp"
#include "device.hpp"

namespace kbtp {
namespace {

constexpr std::size_t kStaging = 256 * 1024;
constexpr std::size_t kEventBudget = 2 * 1024 * 1024;  // octets of one pair before the others have their turn
constexpr u32 kDirectMinimum = 8 * 1024;               // smaller payloads are cheaper to copy than to ask the kernel for
constexpr u32 kForetoldMinimum = 1024;                 // smaller ones gain nothing from being copied and checked at once
// Read past a frame that will be placed directly, or staged whole: enough for its trailer and the next frame's header, so that the next
// one can go directly too.
constexpr std::size_t kLookAhead = 64;

}  // namespace

void QueuePair::receive() {
    if (staging_.empty()) staging_.resize(kStaging);
    for (std::size_t budget = kEventBudget; budget > 0 && is_open();) {
        const std::ptrdiff_t n = direct_.active && direct_.placed < direct_.payload ? fill_direct() : fill();
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) end(wire::error::tcp_lost.packed(), 0, Status::ok);
            break;
        }
        if (n == 0) {
            if (is_open()) on_end_of_stream();
            break;
        }
        budget -= std::min<std::size_t>(budget, static_cast<std::size_t>(n));
        if (state_.load() == State::terminating) {
            begin_ = end_ = 0;  // what comes after an error is read away, so that closing does not reset the connection
            continue;
        }
        parse();
        if (ran_dry_) break;  // asking again would only say so; what comes later is an event of its own
    }
    if (replies_waiting_) {
        replies_waiting_ = false;
        std::lock_guard lock(tx_mutex_);
        if (!write_armed_) pump_and_arm(0);
    }
    flush_completions();
}

// Read into the staging buffer. The return value is recv's.
std::ptrdiff_t QueuePair::fill() {
    if (begin_ == end_) begin_ = end_ = 0;
    if (begin_ > 0 && kStaging - end_ < wire::fpdu_size(0xffff) + kLookAhead) {
        std::memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
    }
    const std::size_t available = end_ - begin_;
    std::size_t want = kStaging - end_;
    if (available >= wire::kLengthField) {
        const u32 ulpdu = load_be<u16>(&staging_[begin_]);
        if (ulpdu > kDirectMinimum) want = std::min(want, wire::fpdu_size(ulpdu) - available + kLookAhead);
    }
    const ssize_t n = socket_receive(capture_.get(), fd_, staging_.data() + end_, want);
    ran_dry_ = n > 0 && static_cast<std::size_t>(n) < want;
    if (n > 0) {
        end_ += static_cast<std::size_t>(n);
        stats_.bytes_received += static_cast<u64>(n);
    }
    return n;
}

// Read the rest of a payload straight to its place, and a little more into the (empty) staging buffer.
std::ptrdiff_t QueuePair::fill_direct() {
    const Pin pin(direct_.at.region);
    if (!pin) {
        place_gone(direct_.segment);
        errno = EAGAIN;
        return -1;
    }
    const u32 left = direct_.payload - direct_.placed;
    IoVectors pieces;
    direct_.at.region->gather(direct_.at.offset + direct_.placed, left, pieces);
    std::size_t direct_bytes = left;
    if (pieces.size() >= IOV_MAX) {
        pieces.resize(IOV_MAX);
        direct_bytes = 0;
        for (const iovec& p : pieces) direct_bytes += p.iov_len;
    }
    begin_ = end_ = 0;  // while payload is missing nothing of what follows it can be staged
    if (direct_bytes == left) {
        if (pieces.size() == IOV_MAX) {
            direct_bytes -= pieces.back().iov_len;
            pieces.pop_back();
        } else {
            pieces.push_back({staging_.data(), direct_.segment.last ? std::size_t{4096} : kLookAhead});
        }
    }
    const ssize_t n = socket_receive(capture_.get(), fd_, pieces);
    ran_dry_ = n > 0 && static_cast<std::size_t>(n) < direct_bytes;
    if (n <= 0) return n;
    stats_.bytes_received += static_cast<u64>(n);
    std::size_t placed = std::min<std::size_t>(static_cast<std::size_t>(n), direct_bytes);
    end_ = static_cast<std::size_t>(n) - placed;
    direct_.placed += static_cast<u32>(placed);
    for (const iovec& p : pieces) {  // hot in the cache
        const std::size_t step = std::min(p.iov_len, placed);
        direct_.crc = sum(direct_.crc, p.iov_base, step);
        placed -= step;
        if (placed == 0) break;
    }
    return n;
}

void QueuePair::parse() {
    parse_frames();
    settle_answers();
}

void QueuePair::parse_frames() {
    while (is_open() && state_.load() != State::terminating) {
        if (direct_.active) {
            if (!finish_direct()) return;
            continue;
        }
        const std::size_t available = end_ - begin_;
        if (available < wire::kLengthField) return;
        const u8* frame = &staging_[begin_];
        const u32 ulpdu = load_be<u16>(frame);
        const u32 size = wire::fpdu_size(ulpdu);
        if (available < size) {
            if (start_direct(ulpdu, available)) continue;
            return;
        }
        begin_ += size;
        constexpr std::size_t head = wire::kLengthField + wire::kUntaggedHeader;
        if (has_executor_ && available > size + head) executor_->foresee({frame + size + head, available - size - head});
        take_frame(frame, ulpdu);
    }
}

// Begin to place a frame that has not wholly arrived, if it is large and goes exactly where it must.
bool QueuePair::start_direct(u32 ulpdu, std::size_t available) {
    if (!seen_frame_ || available < wire::kLengthField + wire::kUntaggedHeader || ulpdu < kDirectMinimum + wire::kUntaggedHeader)
        return false;
    const u8* frame = &staging_[begin_];
    const wire::Segment segment = wire::decode_segment(frame + wire::kLengthField);
    const u32 header = segment.header_size(), payload = ulpdu - header;
    if (check_kind(segment) || !goes_as_foretold(segment, payload)) return false;
    // An executor and a requester look at messages of one segment whole.
    if ((has_executor_ || has_requester_) && !segment.tagged && segment.last && segment.offset == 0) return false;
    settle_answers();
    Placement at;
    std::optional<wire::TerminateCode> wrong;
    if (segment.opcode == wire::opcode::write)
        wrong = admit_write(segment, payload, at);
    else if (segment.opcode == wire::opcode::read_response)
        wrong = admit_read_response(segment, payload, at);
    else
        wrong = admit_send(segment, payload, at);
    if (wrong || !at.region) return false;  // judged again, and failed, once the whole frame and its CRC are here

    // All of the payload may be here already, and some of the trailer: that stays in the staging buffer.
    const std::size_t head = wire::kLengthField + header, here = std::min<std::size_t>(available - head, payload);
    direct_ = Direct{.active = true, .segment = segment, .at = at, .ulpdu = ulpdu, .payload = payload};
    std::copy_n(frame, head, direct_.head.begin());
    direct_.crc = sum(0, frame, head + here);
    frame_ = direct_.head.data();
    frame_ulpdu_ = ulpdu;
    if (!place(segment, at, frame + head, static_cast<u32>(here))) return true;
    direct_.placed = static_cast<u32>(here);
    begin_ += head + here;
    return true;
}

// False while octets of the frame are missing.
bool QueuePair::finish_direct() {
    if (direct_.placed < direct_.payload) return false;
    const u32 pad = wire::pad_for(direct_.ulpdu);
    if (end_ - begin_ < pad + wire::kCrcField) return false;
    const u8* tail = &staging_[begin_];
    const u32 crc = sum(direct_.crc, tail, pad);
    u32 sent = 0;
    for (int i = 0; i < 4; ++i) sent |= u32{tail[pad + i]} << (8 * i);
    begin_ += pad + wire::kCrcField;
    direct_.active = false;
    ++stats_.fpdus_received;
    if (checks_crc_ && crc != sent) {
        ++stats_.crc_errors;
        fail(wire::error::bad_crc);
        return true;
    }
    placed(direct_.segment, nullptr, direct_.payload);
    return true;
}

// A whole frame is in the staging buffer: CRC first, then the header, then the payload.
void QueuePair::take_frame(const u8* frame, u32 ulpdu) {
    const u32 covered = wire::kLengthField + ulpdu + wire::pad_for(ulpdu);
    u32 sent = 0;
    for (int i = 0; i < 4; ++i) sent |= u32{frame[covered + i]} << (8 * i);
    frame_ = nullptr;
    ++stats_.fpdus_received;
    if (take_foretold(frame, ulpdu, sent)) return;
    if (checks_crc_ && crc32c_extend(0, frame, covered) != sent) {
        settle_answers();
        ++stats_.crc_errors;
        return fail(wire::error::bad_crc);
    }
    const u8* body = frame + wire::kLengthField;
    if (ulpdu < wire::kTaggedHeader || (!wire::is_tagged(body[0]) && ulpdu < wire::kUntaggedHeader)) {
        settle_answers();
        may_answer();
        return fail(wire::error::ddp_catastrophic);
    }
    frame_ = frame;
    frame_ulpdu_ = ulpdu;
    const wire::Segment segment = wire::decode_segment(body);
    const u32 n = ulpdu - segment.header_size();
    const u8* payload = body + segment.header_size();
    const bool first = !seen_frame_;
    may_answer();
    if (first && peer_to_peer_ && segment.opcode == wire::opcode::send && !segment.tagged && n == 0 && segment.msn == 1) {
        ++expected_send_msn_;  // the ready-to-receive Send of RFC 6581 is not for the ULP
        ++stats_.messages_received;
        return;
    }
    if (may_be_answer(segment, payload, n)) {
        ++expected_send_msn_;
        forget_foretold({payload, n});
        return answers_.push_back(frame);
    }
    settle_answers();
    frame_ = frame;
    frame_ulpdu_ = ulpdu;
    if (execute(segment, payload, n)) return;
    const auto at = admit(segment, n);
    if (!at) return;
    if (!place(segment, *at, payload, n)) return;
    placed(segment, payload, n);
}

// A Write that can only go where it says is copied and checked in one pass. False, and nothing done, for any other frame.
bool QueuePair::take_foretold(const u8* frame, u32 ulpdu, u32 crc_sent) {
    if (!has_requester_ || ulpdu < kForetoldMinimum || !seen_frame_ || !checks_crc_) return false;
    const wire::Segment segment = wire::decode_segment(frame + wire::kLengthField);
    const u32 head = wire::kLengthField + segment.header_size(), n = ulpdu - segment.header_size();
    if (segment.opcode != wire::opcode::write || check_kind(segment) || !goes_as_foretold(segment, n)) return false;
    if (check_write(segment, n)) return false;
    if (pinned_ != write_region_) {
        settle_answers();
        if (!write_region_->pin()) return false;
        pinned_ = write_region_;
    }
    pieces_.clear();
    write_region_->gather(segment.offset, n, pieces_);
    u32 crc = crc32c_extend(0, frame, head);
    const u8* payload = frame + head;
    for (const iovec& piece : pieces_) {
        crc = crc32c_copy(crc, piece.iov_base, payload, piece.iov_len);
        payload += piece.iov_len;
    }
    if (const u32 pad = wire::pad_for(ulpdu); pad > 0) crc = crc32c_extend(crc, frame + head + n, pad);
    if (crc != crc_sent) {
        settle_answers();
        ++stats_.crc_errors;
        fail(wire::error::bad_crc);
        return true;
    }
    frame_ = frame;
    frame_ulpdu_ = ulpdu;
    placed(segment, nullptr, n);
    return true;
}

// One good frame has arrived: from now on the passive side may send.
void QueuePair::may_answer() {
    if (seen_frame_) return;
    seen_frame_ = true;
    if (!is_passive_) return;
    deadline = TimePoint::max();
    std::lock_guard lock(tx_mutex_);
    may_send_ = true;
    pump_and_arm(0);
}

bool QueuePair::place(const wire::Segment& s, const Placement& at, const u8* payload, u32 n) {
    if (!at.region || n == 0) return true;
    const BorrowedPin pin(at.region.get());
    if (!pin) {
        place_gone(s);
        return false;
    }
    pieces_.clear();
    at.region->gather(at.offset, n, pieces_);
    for (const iovec& p : pieces_) {
        std::memcpy(p.iov_base, payload, p.iov_len);
        payload += p.iov_len;
    }
    return true;
}

// The region was closed after the segment was admitted: for a Send it is the receive buffer, which is a fault on this side.
void QueuePair::place_gone(const wire::Segment& s) {
    if (inbound_ && !s.tagged) inbound_->status = Status::local_protection;
    fail(s.tagged ? wire::error::tagged_invalid_stag : wire::error::rdmap_catastrophic);
}

// Version, opcode, tagged or not, and queue must agree (iwarp-reference 3.1 and 3.4).
std::optional<wire::TerminateCode> QueuePair::check_kind(const wire::Segment& s) const {
    namespace op = wire::opcode;
    if (s.ddp_version != 1) return s.tagged ? wire::error::tagged_version : wire::error::untagged_version;
    if (s.rdmap_version != 1) return wire::error::rdmap_version;
    if (s.opcode > op::atomic_response) return wire::error::unexpected_opcode;
    const bool must_be_tagged = s.opcode == op::write || s.opcode == op::read_response;
    if (s.tagged != must_be_tagged) return wire::error::unexpected_opcode;
    if (s.tagged) return {};
    u32 qn = wire::queue::send;
    if (s.opcode == op::read_request || s.opcode == op::atomic_request) qn = wire::queue::request;
    if (s.opcode == op::terminate) qn = wire::queue::terminate;
    if (s.opcode == op::atomic_response) qn = wire::queue::atomic_response;
    if (s.qn != qn) return wire::error::untagged_qn;
    return {};
}

std::optional<QueuePair::Placement> QueuePair::admit(const wire::Segment& s, u32 n) {
    namespace op = wire::opcode;
    Placement at;
    std::optional<wire::TerminateCode> wrong = check_kind(s);
    // Messages of one segment with a header of fixed size, on a queue of their own.
    const auto single = [&](u32 expected_msn, u32 size) -> std::optional<wire::TerminateCode> {
        if (s.msn != expected_msn) return wire::error::untagged_msn;
        if (s.offset != 0) return wire::error::untagged_offset;
        if (n > size) return wire::error::untagged_too_long;
        if (n < size || !s.last) return wire::error::rdmap_unspecified;
        return {};
    };
    if (!wrong) switch (s.opcode) {
            case op::write:
                wrong = admit_write(s, n, at);
                break;
            case op::read_response:
                wrong = admit_read_response(s, n, at);
                break;
            case op::read_request:
                wrong = single(expected_request_msn_, wire::kReadRequestHeader);
                break;
            case op::atomic_request:
                wrong = single(expected_request_msn_, wire::kAtomicRequestHeader);
                break;
            case op::atomic_response:
                wrong = single(expected_atomic_msn_, wire::kAtomicResponseHeader);
                break;
            case op::terminate:
                break;  // leniently: its sender is gone anyway
            default:
                wrong = admit_send(s, n, at);
        }
    if (!wrong && (s.opcode == op::read_request || s.opcode == op::atomic_request)) {
        std::lock_guard lock(tx_mutex_);
        if (inbound_requests_ >= ird_) wrong = wire::error::untagged_no_buffer;
    }
    if (wrong) {
        fail(*wrong);
        return {};
    }
    return at;
}

// Whether a Write with n > 0 may go where it says, which is in write_region_ then.
std::optional<wire::TerminateCode> QueuePair::check_write(const wire::Segment& s, u32 n) {
    if (!write_region_ || write_region_->stag() != s.stag || !write_region_->is_valid()) write_region_ = device_->regions().find(s.stag);
    const RegionPtr& region = write_region_;
    if (!region || !region->is_valid()) return wire::error::tagged_invalid_stag;
    if (region->pd() != pd_) return wire::error::tagged_other_stream;
    if (!region->has(access::remote_write)) return wire::error::tagged_invalid_stag;
    if (s.offset + n < s.offset) return wire::error::tagged_wrap;
    if (!region->contains(s.offset, n)) return wire::error::tagged_bounds;
    return {};
}

std::optional<wire::TerminateCode> QueuePair::admit_write(const wire::Segment& s, u32 n, Placement& at) {
    if (n == 0) return s.last ? std::nullopt : std::optional(wire::error::rdmap_unspecified);  // STag and offset must not be looked at
    const auto wrong = check_write(s, n);
    if (!wrong) at = {write_region_, s.offset};
    return wrong;
}

std::optional<wire::TerminateCode> QueuePair::admit_read_response(const wire::Segment& s, u32 n, Placement& at) {
    std::lock_guard lock(tx_mutex_);
    if (outstanding_.empty() || outstanding_.front().is_atomic) return wire::error::unexpected_opcode;
    const Outstanding& o = outstanding_.front();
    if (o.length == 0) return n == 0 && s.last ? std::nullopt : std::optional(wire::error::tagged_bounds);
    if (s.stag != o.sink_stag) return wire::error::tagged_invalid_stag;
    if (s.offset != o.sink_offset + o.received || n > o.length - o.received || n == 0) return wire::error::tagged_bounds;
    if (s.last != (o.received + n == o.length)) return wire::error::tagged_bounds;
    if (!o.sink->is_valid()) return wire::error::tagged_invalid_stag;
    at = {o.sink, s.offset};
    return {};
}

std::optional<wire::TerminateCode> QueuePair::admit_send(const wire::Segment& s, u32 n, Placement& at) {
    if (s.msn != expected_send_msn_) return wire::error::untagged_msn;
    if (inbound_) {
        // Only Sends with Invalidate have an STag; in others the field is not looked at.
        const bool invalidates = s.opcode == wire::opcode::send_invalidate || s.opcode == wire::opcode::send_se_invalidate;
        if (s.opcode != inbound_->opcode || (invalidates && s.stag != inbound_->stag)) return wire::error::unexpected_opcode;
        if (s.offset != inbound_->received) return wire::error::untagged_offset;
    } else if (s.offset != 0) {
        return wire::error::untagged_offset;
    }
    const bool immediate = s.opcode == wire::opcode::immediate || s.opcode == wire::opcode::immediate_se;
    if (immediate && (n != wire::kImmediateData || !s.last)) return wire::error::rdmap_unspecified;
    if (n == 0 && !s.last) return wire::error::rdmap_unspecified;
    if (!inbound_) {
        std::lock_guard lock(rq_mutex_);
        if (receive_queue_.empty()) return wire::error::untagged_no_buffer;
        inbound_ = Inbound{receive_queue_.front(), s.opcode, s.stag};
        receive_queue_.pop_front();
    }
    if (immediate) return {};
    const Receive& buffer = inbound_->buffer;
    if (n > buffer.request.length - inbound_->received) return wire::error::untagged_too_long;
    if (!buffer.region && n > 0) {
        inbound_->status = Status::local_protection;  // reported by `end`
        return wire::error::rdmap_catastrophic;
    }
    at = {buffer.region, buffer.request.offset + inbound_->received};
    return {};
}

// Whether a header that no CRC vouches for yet can only mean what the frames before it said would come.
bool QueuePair::goes_as_foretold(const wire::Segment& s, u32 n) {
    if (s.opcode == wire::opcode::write) {
        if (write_open_) return s.stag == write_stag_ && s.offset == write_next_;
        return answers_next_load(s, n);
    }
    // A Read response and a Send are compared with the outstanding Read and the posted receive by `admit_*`.
    return s.opcode == wire::opcode::read_response || (s.opcode >= wire::opcode::send && s.opcode <= wire::opcode::send_se_invalidate);
}

// Whether a Write begins exactly where the oldest unanswered LOAD wants its data. If it should be meant for another place after all, it
// spoils nothing but memory that this LOAD has given away until it is answered.
bool QueuePair::answers_next_load(const wire::Segment& s, u32 n) {
    if (!has_requester_) return false;
    if (foretold_.empty()) foretell();
    if (foretold_.empty()) return false;
    const ExpectedWrite& next = foretold_.front();
    return s.stag == next.stag && s.offset == next.offset && n <= next.length;
}

void QueuePair::placed(const wire::Segment& s, const u8* payload, u32 n) {
    namespace op = wire::opcode;
    stats_.messages_received += s.last;
    switch (s.opcode) {
        case op::write:
            write_open_ = !s.last;
            write_stag_ = s.stag;
            write_next_ = s.offset + n;
            break;
        case op::read_response:
            on_read_response(s, n);
            break;
        case op::read_request:
            on_read_request(s, payload);
            break;
        case op::atomic_request:
            on_atomic_request(s, payload);
            break;
        case op::atomic_response:
            on_atomic_response(s, payload);
            break;
        case op::terminate:
            on_terminate(payload, n);
            break;
        default:
            inbound_->received += n;
            if (s.last && !execute_received(s)) deliver_send(s, payload);
    }
}

void QueuePair::flush_completions() {
    cq_->push(pending_);
    pending_.clear();
}

}  // namespace kbtp

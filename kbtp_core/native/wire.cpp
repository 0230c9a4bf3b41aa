#include "wire.hpp"

#include <algorithm>

namespace kbtp::wire {
namespace {

constexpr char kRequestKey[] = "MPA ID Req Frame", kReplyKey[] = "MPA ID Rep Frame";
constexpr std::size_t kKey = 16;

constexpr u8 kMarkers = 0x80, kCrc = 0x40, kRejected = 0x20, kEnhancedFlag = 0x10;
constexpr u16 kHighFlag = 0x8000, kLowFlag = 0x4000, kDepth = 0x3fff;

}  // namespace

std::vector<u8> encode_startup(const Startup& f) {
    const std::size_t size = f.private_data.size() + (f.enhanced ? kEnhanced : 0);
    std::vector<u8> out(kStartupHeader + size);
    std::memcpy(out.data(), f.is_reply ? kReplyKey : kRequestKey, kKey);
    out[16] =
        static_cast<u8>((f.markers ? kMarkers : 0) | (f.crc ? kCrc : 0) | (f.rejected ? kRejected : 0) | (f.enhanced ? kEnhancedFlag : 0));
    out[17] = f.revision;
    store_be<u16>(&out[18], static_cast<u16>(size));
    auto at = out.begin() + kStartupHeader;
    if (f.enhanced) {
        store_be<u16>(&out[20], static_cast<u16>((f.peer_to_peer ? kHighFlag : 0) | (f.rtr_send ? kLowFlag : 0) | (f.ird & kDepth)));
        store_be<u16>(&out[22], static_cast<u16>((f.rtr_write ? kHighFlag : 0) | (f.rtr_read ? kLowFlag : 0) | (f.ord & kDepth)));
        at += kEnhanced;
    }
    std::copy(f.private_data.begin(), f.private_data.end(), at);
    return out;
}

std::optional<u16> startup_length(std::span<const u8, kStartupHeader> header, bool expect_reply) {
    if (std::memcmp(header.data(), expect_reply ? kReplyKey : kRequestKey, kKey) != 0) return {};
    const u8 revision = header[17];
    const bool enhanced = (header[16] & kEnhancedFlag) != 0;
    const u16 length = load_be<u16>(&header[18]);
    if (revision != 1 && revision != 2) return {};
    if (length > kMaxPrivateData) return {};
    if (revision == 2 && enhanced && length < kEnhanced) return {};
    return length;
}

std::optional<Startup> decode_startup(std::span<const u8> frame) {
    if (frame.size() < kStartupHeader || frame.size() != kStartupHeader + load_be<u16>(&frame[18])) return {};
    Startup f;
    f.is_reply = std::memcmp(frame.data(), kReplyKey, kKey) == 0;
    const u8 flags = frame[16];
    f.markers = flags & kMarkers;
    f.crc = flags & kCrc;
    f.rejected = f.is_reply && (flags & kRejected);
    f.revision = frame[17];
    f.enhanced = f.revision >= 2 && (flags & kEnhancedFlag);
    auto rest = frame.subspan(kStartupHeader);
    if (f.enhanced) {
        if (rest.size() < kEnhanced) return {};
        const u16 first = load_be<u16>(rest.data()), second = load_be<u16>(rest.data() + 2);
        f.peer_to_peer = first & kHighFlag;
        f.rtr_send = first & kLowFlag;
        f.rtr_write = second & kHighFlag;
        f.rtr_read = second & kLowFlag;
        f.ird = first & kDepth;
        f.ord = second & kDepth;
        rest = rest.subspan(kEnhanced);
    }
    f.private_data.assign(rest.begin(), rest.end());
    return f;
}

void encode_segment(const Segment& s, u8* out) {
    out[0] = static_cast<u8>((s.tagged ? 0x80 : 0) | (s.last ? 0x40 : 0) | (s.ddp_version & 3));
    out[1] = static_cast<u8>((s.rdmap_version & 3) << 6 | (s.opcode & 15));
    store_be<u32>(out + 2, s.stag);
    if (s.tagged) {
        store_be<u64>(out + 6, s.offset);
    } else {
        store_be<u32>(out + 6, s.qn);
        store_be<u32>(out + 10, s.msn);
        store_be<u32>(out + 14, static_cast<u32>(s.offset));
    }
}

Segment decode_segment(const u8* u) {
    Segment s;
    s.tagged = is_tagged(u[0]);
    s.last = u[0] & 0x40;
    s.ddp_version = u[0] & 3;
    s.rdmap_version = u[1] >> 6;
    s.opcode = u[1] & 15;
    s.stag = load_be<u32>(u + 2);
    if (s.tagged) {
        s.offset = load_be<u64>(u + 6);
    } else {
        s.qn = load_be<u32>(u + 6);
        s.msn = load_be<u32>(u + 10);
        s.offset = load_be<u32>(u + 14);
    }
    return s;
}

void encode(const ReadRequest& r, u8* out) {
    store_be<u32>(out, r.sink_stag);
    store_be<u64>(out + 4, r.sink_offset);
    store_be<u32>(out + 12, r.size);
    store_be<u32>(out + 16, r.source_stag);
    store_be<u64>(out + 20, r.source_offset);
}

ReadRequest decode_read_request(const u8* in) {
    return {load_be<u32>(in), load_be<u64>(in + 4), load_be<u32>(in + 12), load_be<u32>(in + 16), load_be<u64>(in + 20)};
}

void encode(const AtomicRequest& r, u8* out) {
    store_be<u32>(out, r.code);
    store_be<u32>(out + 4, r.id);
    store_be<u32>(out + 8, r.stag);
    store_be<u64>(out + 12, r.offset);
    store_be<u64>(out + 20, r.operand);
    store_be<u64>(out + 28, r.mask);
    store_be<u64>(out + 36, r.compare);
    store_be<u64>(out + 44, r.compare_mask);
}

AtomicRequest decode_atomic_request(const u8* in) {
    return {load_be<u32>(in) & 15, load_be<u32>(in + 4),  load_be<u32>(in + 8),  load_be<u64>(in + 12),
            load_be<u64>(in + 20), load_be<u64>(in + 28), load_be<u64>(in + 36), load_be<u64>(in + 44)};
}

std::vector<u8> encode_terminate(TerminateCode code, const Quoted& quoted) {
    const bool has_ddp = !quoted.ddp_header.empty(), has_rdma = !quoted.rdma_header.empty();
    std::vector<u8> out(4);
    out[0] = static_cast<u8>(code.layer << 4 | code.type);
    out[1] = code.code;
    // M: the segment length is there; D: the DDP header; R: the RDMAP header.
    store_be<u16>(&out[2], static_cast<u16>((has_ddp ? 0xC000 : 0) | (has_rdma ? 0x2000 : 0)));
    if (has_ddp) {
        out.resize(6);
        store_be<u16>(&out[4], quoted.ulpdu_length);
        out.insert(out.end(), quoted.ddp_header.begin(), quoted.ddp_header.end());
        out.insert(out.end(), quoted.rdma_header.begin(), quoted.rdma_header.end());
    }
    return out;
}

}  // namespace kbtp::wire

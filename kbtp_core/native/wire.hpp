// Every octet of MPA, DDP and RDMAP that this stack writes or reads: RFC 5044, 6581, 5041, 5040, 7306.
// Layouts only; who may say what when is in qp_*.cpp. Section numbers below are of iwarp-reference.md.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "types.hpp"

namespace kbtp::wire {

// --- MPA start-up (1.1, 1.2) ---------------------------------------------------------------------------------------------

inline constexpr std::size_t kStartupHeader = 20, kMaxPrivateData = 512, kEnhanced = 4;
// Linux siw and cxgb4 refuse more than 256 octets in all.
inline constexpr std::size_t kMaxUlpPrivateData = 252;
inline constexpr u16 kNoNegotiation = 0x3fff;

struct Startup {
    bool is_reply = false;
    bool markers = false, crc = true, rejected = false, enhanced = true;
    u8 revision = 2;
    // Enhanced connection data; meaningless unless `enhanced`.
    bool peer_to_peer = false, rtr_send = false, rtr_write = false, rtr_read = false;
    u16 ird = 0, ord = 0;
    std::vector<u8> private_data;
};

std::vector<u8> encode_startup(const Startup& frame);

// The private data length announced by the first 20 octets, or nothing if they are no request / no reply (1.3 rule 3).
std::optional<u16> startup_length(std::span<const u8, kStartupHeader> header, bool expect_reply);

// A whole frame whose header `startup_length` accepted; nothing if the enhanced data does not fit.
std::optional<Startup> decode_startup(std::span<const u8> frame);

// --- FPDU, DDP, RDMAP (1.4, 2.1, 3.1) --------------------------------------------------------------------------------------

inline constexpr u32 kMaxUlpdu = 64768;
inline constexpr u32 kTaggedHeader = 14, kUntaggedHeader = 18;
inline constexpr u32 kLengthField = 2, kCrcField = 4;
inline constexpr u32 kReadRequestHeader = 28, kAtomicRequestHeader = 52, kAtomicResponseHeader = 12, kImmediateData = 8;

inline constexpr u32 kMarkerInterval = 512, kMarker = 4;  // 1.6

inline u32 pad_for(u32 ulpdu) { return -(kLengthField + ulpdu) & 3; }
inline u32 fpdu_size(u32 ulpdu) { return kLengthField + ulpdu + pad_for(ulpdu) + kCrcField; }

namespace opcode {
inline constexpr u8 write = 0, read_request = 1, read_response = 2, send = 3, send_invalidate = 4, send_se = 5, send_se_invalidate = 6,
                    terminate = 7, immediate = 8, immediate_se = 9, atomic_request = 10, atomic_response = 11;
}
namespace queue {
inline constexpr u32 send = 0, request = 1, terminate = 2, atomic_response = 3;
}

// One DDP segment's header, either kind.
struct Segment {
    bool tagged = false, last = true;
    u8 ddp_version = 1, rdmap_version = 1, opcode = 0;
    u32 stag = 0;         // tagged: the target; untagged: the STag to invalidate, else 0
    u64 offset = 0;       // tagged offset, or message offset
    u32 qn = 0, msn = 0;  // untagged only

    u32 header_size() const { return tagged ? kTaggedHeader : kUntaggedHeader; }
};

// Writes header_size() octets.
void encode_segment(const Segment& segment, u8* out);
// Reads a header from a ULPDU that is long enough for its kind.
Segment decode_segment(const u8* ulpdu);
inline bool is_tagged(u8 ddp_control) { return (ddp_control & 0x80) != 0; }

struct ReadRequest {  // 3.2
    u32 sink_stag = 0;
    u64 sink_offset = 0;
    u32 size = 0;
    u32 source_stag = 0;
    u64 source_offset = 0;
};
void encode(const ReadRequest& request, u8* out);
ReadRequest decode_read_request(const u8* in);

struct AtomicRequest {  // 4.1
    u32 code = 0;       // 0 FetchAdd, 2 CmpSwap
    u32 id = 0, stag = 0;
    u64 offset = 0, operand = 0, mask = 0, compare = 0, compare_mask = ~u64{0};
};
inline constexpr u32 kFetchAdd = 0, kCmpSwap = 2;
void encode(const AtomicRequest& request, u8* out);
AtomicRequest decode_atomic_request(const u8* in);

// --- Terminate (3.4) -------------------------------------------------------------------------------------------------------

struct TerminateCode {
    u8 layer = 0, type = 0, code = 0;
    // As COMPLETION.value has it (fabric/api.py, terminate_code).
    u64 packed() const { return u64{1} << 16 | u64{layer} << 12 | u64{type} << 8 | code; }
};

namespace error {
inline constexpr TerminateCode rdmap_catastrophic{0, 0, 0};
inline constexpr TerminateCode rdmap_invalid_stag{0, 1, 0}, rdmap_bounds{0, 1, 1}, rdmap_access{0, 1, 2}, rdmap_other_stream{0, 1, 3},
    rdmap_wrap{0, 1, 4}, rdmap_cannot_invalidate{0, 1, 9};
inline constexpr TerminateCode rdmap_version{0, 2, 5}, unexpected_opcode{0, 2, 6}, stream_catastrophic{0, 2, 7},
    rdmap_unspecified{0, 2, 0xff};
inline constexpr TerminateCode ddp_catastrophic{1, 0, 0};
inline constexpr TerminateCode tagged_invalid_stag{1, 1, 0}, tagged_bounds{1, 1, 1}, tagged_other_stream{1, 1, 2}, tagged_wrap{1, 1, 3},
    tagged_version{1, 1, 4};
inline constexpr TerminateCode untagged_qn{1, 2, 1}, untagged_no_buffer{1, 2, 2}, untagged_msn{1, 2, 3}, untagged_offset{1, 2, 4},
    untagged_too_long{1, 2, 5}, untagged_version{1, 2, 6};
inline constexpr TerminateCode tcp_lost{2, 0, 1}, bad_crc{2, 0, 2}, bad_startup{2, 0, 4}, low_ird{2, 0, 6}, no_common_rtr{2, 0, 7};
}  // namespace error

// What the Terminate quotes of the segment at fault: its ULPDU length and as many header octets as the error class asks for.
struct Quoted {
    u16 ulpdu_length = 0;
    std::span<const u8> ddp_header;   // 14 or 18 octets, or empty
    std::span<const u8> rdma_header;  // 28 octets of a Read Request, or empty
};

// The payload of a Terminate message: 4, 20, 24 or 52 octets.
std::vector<u8> encode_terminate(TerminateCode code, const Quoted& quoted);

}  // namespace kbtp::wire

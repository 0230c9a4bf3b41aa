// Frames with markers (RFC 5044 section 4.3), for a peer that asks for them: receivers that place out of order do. No stack that is
// met in practice does, so this copies every frame and leaves the path of everybody else as it is. Under tx_mutex_.
//
// A marker stands at every stream offset that is 0 mod 512, counted from the first octet after the start-up frames with the markers
// counted in. It says how far back the frame that it stands in began; one between two frames belongs to the second and says 0.
#include <algorithm>

#include "device.hpp"

namespace kbtp {

// The frame of the next `n` octets of `m`, whose source is pinned, goes into the burst.
void QueuePair::append_marked(Message& m, u32 n) {
    const u32 header = m.header.header_size(), ulpdu = header + n;
    std::vector<u8> plain(wire::fpdu_size(ulpdu) - wire::kCrcField);
    store_be<u16>(plain.data(), static_cast<u16>(ulpdu));
    wire::encode_segment(m.header, plain.data() + wire::kLengthField);
    u8* payload = plain.data() + wire::kLengthField + header;
    if (m.source) {
        IoVectors pieces;
        m.source->gather(m.source_offset + m.sent, n, pieces);
        for (const iovec& p : pieces) payload = std::copy_n(static_cast<const u8*>(p.iov_base), p.iov_len, payload);
    } else {
        std::copy_n(m.own_octets() + m.sent, n, payload);
    }

    // Everything up to the CRC, a marker before it too, is under it.
    std::vector<u8> frame;
    frame.reserve(plain.size() + plain.size() / 64 + 16);
    std::size_t begin = 0;  // of the length field
    const auto mark = [&] {
        if (stream_position_ % wire::kMarkerInterval != 0) return;
        const u16 back = static_cast<u16>(frame.size() - begin);
        frame.insert(frame.end(), {0, 0, static_cast<u8>(back >> 8), static_cast<u8>(back)});
        stream_position_ += wire::kMarker;
    };
    mark();
    begin = frame.size();
    for (std::size_t at = 0; at < plain.size();) {
        mark();
        const std::size_t step = std::min<std::size_t>(plain.size() - at, wire::kMarkerInterval - stream_position_ % wire::kMarkerInterval);
        frame.insert(frame.end(), plain.begin() + static_cast<std::ptrdiff_t>(at), plain.begin() + static_cast<std::ptrdiff_t>(at + step));
        stream_position_ += step;
        at += step;
    }
    mark();
    const u32 crc = sum(0, frame.data(), frame.size());
    for (int i = 0; i < 4; ++i) frame.push_back(static_cast<u8>(crc >> (8 * i)));
    stream_position_ += wire::kCrcField;

    burst_.payload_bytes += frame.size();
    burst_.pieces.push_back({frame.data(), frame.size()});
    burst_.marked.push_back(std::move(frame));
    ++burst_.fpdus;
    ++stats_.fpdus_sent;
    m.header.offset += n;
    m.sent += n;
}

}  // namespace kbtp

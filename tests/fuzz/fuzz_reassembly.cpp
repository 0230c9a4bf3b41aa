// Messages in segments: headers that are nearly always right, so that what is behind the checks is reached.
#include "harness.hpp"

using namespace kbtp;

namespace {

constexpr u32 kStags[] = {fuzz::kOpenStag, fuzz::kReadOnlyStag, fuzz::kPoolStag, 0x2000};

// What a right stream would say next.
struct Sender {
    u32 send_msn = 1, request_msn = 1;
    u32 message_offset = 0;
    u8 open_opcode = 0;
};

void put_request(std::vector<u8>& ulpdu, fuzz::Input& in, u8 opcode) {
    const u32 stag = kStags[in.octet() % 4];
    if (opcode == wire::opcode::read_request) {
        ulpdu.resize(ulpdu.size() + wire::kReadRequestHeader);
        wire::encode(wire::ReadRequest{0x77, in.number<u16>(), in.number<u16>(), stag, in.number<u16>()},
                     ulpdu.data() + ulpdu.size() - wire::kReadRequestHeader);
        return;
    }
    ulpdu.resize(ulpdu.size() + wire::kAtomicRequestHeader);
    wire::AtomicRequest r;
    r.code = in.octet() % 4;
    r.id = in.octet();
    r.stag = stag;
    r.offset = in.number<u16>() & ~7u;
    r.operand = in.number<u64>();
    r.mask = in.number<u64>();
    wire::encode(r, ulpdu.data() + ulpdu.size() - wire::kAtomicRequestHeader);
}

// A KBTP request, mostly sound, as the whole of a Send.
void put_kbtp(std::vector<u8>& ulpdu, fuzz::Input& in) {
    const std::size_t at = ulpdu.size();
    const u8 opcode = static_cast<u8>(3 + in.octet() % 5);
    const u32 inlined = (opcode == 4 || opcode == 5) && (in.octet() & 1) ? in.octet() : 0;
    ulpdu.resize(at + (opcode == 6 ? kHeader : kRequest) + inlined);
    u8* m = ulpdu.data() + at;
    m[0] = 1;
    m[1] = opcode;
    store_be<u16>(m + 2, static_cast<u16>((in.octet() & 0x1a) | (inlined ? 1 : 0)));
    store_be<u64>(m + 4, in.octet());
    store_be<u64>(m + 12, fuzz::kBaseHandle + in.octet() % 18);
    store_be<u16>(m + 20, in.octet() % 4);
    if (opcode == 6) return;
    store_be<u32>(m + 24, inlined ? 0 : 0x77);
    store_be<u64>(m + 28, inlined ? 0 : in.number<u16>());
    store_be<u32>(m + 36, inlined ? inlined : in.number<u16>() % 1100);
}

void put_segment(std::vector<u8>& stream, fuzz::Input& in, Sender& sender) {
    const u8 what = in.octet(), twist = in.octet();
    wire::Segment s;
    s.opcode = sender.message_offset > 0 && (twist & 0x0f) ? sender.open_opcode : what % 12;
    s.last = what & 0x10;
    std::vector<u8> payload;
    if (s.opcode == wire::opcode::write || s.opcode == wire::opcode::read_response) {
        s.tagged = true;
        s.stag = kStags[in.octet() % 4];
        s.offset = in.number<u16>();
        payload.resize(in.number<u16>() % 1500);
    } else if (s.opcode == wire::opcode::read_request || s.opcode == wire::opcode::atomic_request) {
        s.qn = wire::queue::request;
        s.msn = sender.request_msn++;
        s.last = true;
        put_request(payload, in, s.opcode);
    } else if (s.opcode == wire::opcode::terminate || s.opcode == wire::opcode::atomic_response) {
        s.qn = s.opcode == wire::opcode::terminate ? wire::queue::terminate : wire::queue::atomic_response;
        s.msn = 1;
        payload.resize(in.octet() % 60);
    } else {
        s.msn = sender.send_msn;
        s.offset = sender.message_offset;
        s.stag = s.opcode == wire::opcode::send_invalidate || s.opcode == wire::opcode::send_se_invalidate ? kStags[in.octet() % 4] : 0;
        if (s.opcode == wire::opcode::send && sender.message_offset == 0 && (what & 0x20)) {
            s.last = true;
            put_kbtp(payload, in);
        } else {
            payload.resize(s.opcode >= wire::opcode::immediate ? 8 : in.octet());
        }
        sender.open_opcode = s.opcode;
        sender.message_offset = s.last ? 0 : sender.message_offset + static_cast<u32>(payload.size());
        sender.send_msn += s.last;
    }
    if (twist == 0xf0) s.msn += 1;
    if (twist == 0xf1) s.offset += 1;
    if (twist == 0xf2) s.qn += 1;
    if (twist == 0xf3) payload.resize(payload.size() / 2);
    std::vector<u8> ulpdu(s.header_size());
    wire::encode_segment(s, ulpdu.data());
    ulpdu.insert(ulpdu.end(), payload.begin(), payload.end());
    fuzz::append_fpdu(stream, ulpdu);
    if (twist == 0xf4) stream.back() ^= 1;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t size) {
    fuzz::Input in(data, size);
    const u8 mode = in.octet();
    std::vector<u8> stream;
    Sender sender;
    while (!in.empty() && stream.size() < 200'000) put_segment(stream, in, sender);
    fuzz::World().run(stream, mode & 1 ? 1 + std::size_t{mode} : 1 << 16);
    return 0;
}

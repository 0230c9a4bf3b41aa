// The stream after start-up: any octets at all, or any ULPDUs in frames whose length and CRC are right.
#include "harness.hpp"

using namespace kbtp;

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t size) {
    fuzz::Input in(data, size);
    const u8 mode = in.octet();
    const std::size_t piece = (mode & 2) ? 1 + in.octet() : 1 << 16;
    std::vector<u8> stream;
    if (mode & 1) {
        const auto raw = in.bytes(size);
        stream.assign(raw.begin(), raw.end());
    } else {
        while (!in.empty()) {
            const auto ulpdu = in.bytes(in.number<u16>() % 700);
            fuzz::append_fpdu(stream, ulpdu);
        }
    }
    fuzz::World().run(stream, piece);
    return 0;
}

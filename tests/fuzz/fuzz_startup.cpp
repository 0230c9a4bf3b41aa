// Start-up frames: what is accepted can be written again and read back as the same.
#include "harness.hpp"

using namespace kbtp;

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t size) {
    if (size < wire::kStartupHeader) return 0;
    const std::span<const u8, wire::kStartupHeader> header(data, wire::kStartupHeader);
    for (const bool expects_reply : {false, true}) {
        const auto length = wire::startup_length(header, expects_reply);
        if (!length) continue;
        FUZZ_CHECK(*length <= wire::kMaxPrivateData);
        if (size < wire::kStartupHeader + *length) continue;
        const auto frame = wire::decode_startup({data, wire::kStartupHeader + *length});
        if (!frame) continue;
        FUZZ_CHECK(frame->is_reply == expects_reply);
        const auto again = wire::encode_startup(*frame);
        const auto twice = wire::decode_startup(again);
        FUZZ_CHECK(twice.has_value());
        FUZZ_CHECK(twice->markers == frame->markers && twice->crc == frame->crc && twice->rejected == frame->rejected);
        FUZZ_CHECK(twice->enhanced == frame->enhanced && twice->revision == frame->revision);
        FUZZ_CHECK(twice->ird == frame->ird && twice->ord == frame->ord && twice->private_data == frame->private_data);
    }
    return 0;
}

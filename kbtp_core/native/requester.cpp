#include "requester.hpp"

namespace kbtp {

LoadBatch::LoadBatch(u32 sequence, u32 stag, u16 flags, std::vector<LoadRequest> requests)
    : sequence_(sequence),
      stag_(stag),
      flags_(flags),
      requests_(std::move(requests)),
      results_(requests_.size(), LoadResult{kNoStatus, 0, 0, 0, 0, 0}),
      waiting_(requests_.size()) {}

// Draft sections 5.1 and 5.2: header and Data Descriptor of a LOAD. The Request ID is the batch's sequence and the place in it.
ExpectedWrite LoadBatch::encode_next(u8* out) {
    const LoadRequest& r = requests_[next_];
    out[0] = 1;
    out[1] = 3;
    store_be<u16>(out + 2, flags_);
    store_be<u32>(out + 4, sequence_);
    store_be<u32>(out + 8, static_cast<u32>(next_));
    store_be<u64>(out + 12, r.handle);
    store_be<u16>(out + 20, r.generation);
    store_be<u16>(out + 22, 0);
    store_be<u32>(out + 24, stag_);
    store_be<u64>(out + 28, r.offset);
    store_be<u32>(out + 36, r.length);
    waiting_[next_] = true;
    ++outstanding_;
    return {sequence_, static_cast<u32>(next_++), stag_, r.offset, r.length};
}

bool LoadBatch::settle(std::span<const u8, kAnswer> a) {
    const u32 index = index_of(a);
    if (index >= waiting_.size() || !waiting_[index]) return false;
    waiting_[index] = false;
    --outstanding_;
    if (abandoned_) return true;
    results_[index] = {load_be<u16>(&a[22]), load_be<u16>(&a[20]), load_be<u32>(&a[24]), load_be<u64>(&a[32]), load_be<u32>(&a[28]), 0};
    failed_ += results_[index].status != 0;
    return true;
}

void LoadBatch::abandon() {
    abandoned_ = true;
    requests_.resize(next_);
}

}  // namespace kbtp

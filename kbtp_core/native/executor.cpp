#include "executor.hpp"

namespace kbtp {
namespace {

// Draft sections 3.2, 5.1, 5.2 and the tables of kbtp-completion.md.
constexpr u8 kVersion = 1, kOpLoad = 3, kOpCompletion = 8;
constexpr u16 kInvalidate = 0x0008, kAllowUnsealed = 0x0010;
constexpr u16 kValid = 0x0001, kSealed = 0x0002;

}  // namespace

u32 Executor::load_state(u64 entry) const {
    return swap_to_host(__atomic_load_n(reinterpret_cast<const u32*>(table_ + 16 * entry), __ATOMIC_SEQ_CST));
}

std::optional<LoadPlan> Executor::plan(std::span<const u8, kLoadRequest> request, u64 pool_bytes) {
    const u8* r = request.data();
    const u16 flags = load_be<u16>(r + 2);
    if (r[0] != kVersion || r[1] != kOpLoad || (flags & ~(kInvalidate | kAllowUnsealed)) != 0) return {};
    const u64 handle = load_be<u64>(r + 12);
    const u16 wanted = load_be<u16>(r + 20), status = load_be<u16>(r + 22);
    if (status != 0 || handle < base_handle_ || handle - base_handle_ >= entries_) return {};

    LoadPlan plan{};
    plan.entry = handle - base_handle_;
    const u32 state = load_state(plan.entry);
    const u16 entry_flags = static_cast<u16>(state >> 16), generation = static_cast<u16>(state);
    const bool sealed = entry_flags & kSealed;
    if (!(entry_flags & kValid) || (!sealed && !(flags & kAllowUnsealed)) || (wanted != 0 && wanted != generation)) return {};

    // The data length of an unsealed block may change; a torn read is caught by the bounds below, and the entry's owner is one thread.
    const u8* entry = table_ + 16 * plan.entry;
    plan.length = load_be<u32>(entry + 4);
    plan.block_offset = load_be<u64>(entry + 8);
    plan.remote_stag = load_be<u32>(r + 24);
    plan.remote_offset = load_be<u64>(r + 28);
    const u32 room = load_be<u32>(r + 36);
    if (plan.length == 0 || plan.length > room || plan.length > block_bytes_) return {};
    if (plan.block_offset > pool_bytes || plan.length > pool_bytes - plan.block_offset) return {};
    if (plan.remote_offset + plan.length < plan.remote_offset) return {};

    readers_[plan.entry].fetch_add(1);
    if (load_state(plan.entry) != state) {
        readers_[plan.entry].fetch_sub(1);
        return {};
    }

    plan.invalidate = flags & kInvalidate;
    plan.snapshot = !sealed;
    u8* out = plan.reply.data();
    out[0] = kVersion;
    out[1] = kOpCompletion;
    std::memcpy(out + 4, r + 4, 16);  // Request ID and Block Handle, echoed
    store_be<u16>(out + 20, generation);
    store_be<u32>(out + 24, plan.length);
    store_be<u64>(out + 32, plan.block_offset);
    return plan;
}

}  // namespace kbtp

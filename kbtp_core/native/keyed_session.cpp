#include "keyed_session.hpp"

#include <algorithm>

namespace kbtp {
namespace {

constexpr std::size_t kLookupItem = 16, kPublishItem = 32, kPublishResult = 12, kId = 16;
constexpr u64 kMessageSpare = 64;  // a keyed message has at most the granted inline length and this

std::vector<u8> answer_head(std::span<const u8> request, u8 opcode, std::size_t size) {
    std::vector<u8> out(size);
    out[0] = 1;
    out[1] = opcode;
    std::copy_n(&request[4], 8, &out[4]);  // the Request ID
    return out;
}

std::optional<std::vector<u8>> answer_lookup(KeyedStore& store, std::span<const u8> m) {
    if (m.size() < 40) return {};
    const u64 tenant = load_be<u64>(&m[24]);
    const u32 flags = load_be<u32>(&m[32]), count = load_be<u32>(&m[36]);
    if (flags & ~lookup_flag::known || m.size() != 40 + kId * u64{count}) return {};
    // What is on disk can only be asked for, or promoted, by the software target.
    if (store.has_disk() && !store.has_backing()) return {};
    std::vector<LookupItem> found(count);
    const u64 answered = store.lookup(tenant, m.subspan(40), flags, found.data());
    if (flags & lookup_flag::promote)
        for (u64 i = 0; i < answered; ++i)
            if (found[i].tier == Tier::disk) return {};
    auto out = answer_head(m, keyed_opcode::lookup_result, kHeader + 4 + kLookupItem * answered);
    store_be<u32>(&out[24], static_cast<u32>(answered));
    u8* at = out.data() + kHeader + 4;
    for (u64 i = 0; i < answered; ++i, at += kLookupItem) {
        store_be<u64>(at, found[i].handle);
        store_be<u16>(at + 8, found[i].generation);
        at[10] = static_cast<u8>(found[i].tier);
        at[11] = found[i].flags;
        store_be<u32>(at + 12, found[i].length);
    }
    return out;
}

std::optional<std::vector<u8>> answer_publish(const KeyedSession& session, const StoreGrant& grant, std::span<const u8> m,
                                              const std::function<bool(u64)>& may_name) {
    if (m.size() < 40) return {};
    const u64 tenant = load_be<u64>(&m[24]);
    const u32 flags = load_be<u32>(&m[32]), count = load_be<u32>(&m[36]);
    if (flags & ~publish_flag::known || m.size() != 40 + kPublishItem * u64{count}) return {};
    std::vector<PublishItem> items(count);
    decode_publish_items(m.subspan(40), items);
    for (const PublishItem& item : items)
        if (!may_name(item.handle)) return {};
    std::vector<PublishResult> results(count, PublishResult{kNoHandle, status::undecided, 0, 0});
    if (!session.store->publish_now(grant, session.space, tenant, flags, items, results.data())) return {};
    auto out = answer_head(m, keyed_opcode::publish_result, kHeader + 4 + kPublishResult * count);
    store_be<u32>(&out[24], count);
    u8* at = out.data() + kHeader + 4;
    for (const PublishResult& result : results) {
        store_be<u16>(at, result.status);
        store_be<u16>(at + 2, result.generation);
        store_be<u64>(at + 4, result.handle);
        at += kPublishResult;
    }
    return out;
}

std::optional<std::vector<u8>> answer_remove(KeyedStore& store, std::span<const u8> m) {
    if (m.size() < 36 || store.has_disk()) return {};
    const u64 tenant = load_be<u64>(&m[24]);
    const u32 count = load_be<u32>(&m[32]);
    if (m.size() != 36 + kId * u64{count}) return {};
    const u64 removed = store.remove(tenant, m.subspan(36), false, nullptr);
    auto out = answer_head(m, opcode::completion, kAnswer);
    store_be<u32>(&out[24], static_cast<u32>(removed));
    return out;
}

}  // namespace

void decode_publish_items(std::span<const u8> octets, std::span<PublishItem> out) {
    for (std::size_t i = 0; i < out.size(); ++i) {
        const u8* at = &octets[kPublishItem * i];
        std::copy_n(at, kId, out[i].id.begin());
        out[i].handle = load_be<u64>(at + 16);
        out[i].generation = load_be<u16>(at + 24);
        out[i].crc = load_be<u32>(at + 28);
        out[i].is_copied = 0;
    }
}

std::optional<std::vector<u8>> answer_keyed(const KeyedSession& session, const StoreGrant& grant, std::span<const u8> message,
                                            const std::function<bool(u64 handle)>& may_name) {
    if (message.size() < kHeader || message.size() > u64{grant.inline_bytes} + kMessageSpare || message[0] != 1 ||
        load_be<u16>(&message[2]) != 0)
        return {};
    switch (message[1]) {
        case keyed_opcode::lookup:
            return answer_lookup(*session.store, message);
        case keyed_opcode::publish:
            return answer_publish(session, grant, message, may_name);
        case keyed_opcode::remove:
            return answer_remove(*session.store, message);
        default:
            return {};
    }
}

}  // namespace kbtp

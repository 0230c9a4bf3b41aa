#include "keyed_session.hpp"

#include <algorithm>

namespace kbtp {
namespace {

constexpr std::size_t kLookupItem = 16, kPublishItem = 32, kPublishResult = 12, kId = 16, kGetHead = 48, kGetItem = 32;
// A keyed message has at most the granted inline length and 64 octets; 128 are always taken.
u64 longest(const StoreGrant& grant) { return std::max<u64>(u64{grant.inline_bytes} + 64, 128); }

bool is_plain(const StoreGrant& grant, std::span<const u8> m) {
    return m.size() >= kHeader && m.size() <= longest(grant) && m[0] == 1 && load_be<u16>(&m[2]) == 0;
}

std::vector<u8> answer_head(std::span<const u8> request, u8 opcode, std::size_t size) {
    std::vector<u8> out(size);
    out[0] = 1;
    out[1] = opcode;
    std::copy_n(&request[4], 8, &out[4]);  // the Request ID
    return out;
}

// Nothing: what is on disk can only be asked for, or promoted, by the software target.
std::optional<std::vector<LookupItem>> look_up(KeyedStore& store, u64 tenant, std::span<const u8> ids, u32 flags) {
    if (store.has_disk() && !store.has_backing()) return {};
    std::vector<LookupItem> found(ids.size() / kId);
    found.resize(store.lookup(tenant, ids, flags, found.data()));
    if (flags & lookup_flag::promote)
        for (const LookupItem& item : found)
            if (item.tier == Tier::disk) return {};
    store.note_lookup(found);
    return found;
}

std::vector<u8> encode_found(std::span<const u8> m, u8 opcode, std::span<const LookupItem> found) {
    auto out = answer_head(m, opcode, kHeader + 4 + kLookupItem * found.size());
    store_be<u32>(&out[24], static_cast<u32>(found.size()));
    u8* at = out.data() + kHeader + 4;
    for (const LookupItem& item : found) {
        store_be<u64>(at, item.handle);
        store_be<u16>(at + 8, item.generation);
        at[10] = static_cast<u8>(item.tier);
        at[11] = item.flags;
        store_be<u32>(at + 12, item.length);
        at += kLookupItem;
    }
    return out;
}

std::optional<std::vector<u8>> answer_lookup(KeyedStore& store, std::span<const u8> m) {
    if (m.size() < 40) return {};
    const u32 flags = load_be<u32>(&m[32]), count = load_be<u32>(&m[36]);
    if (flags & ~lookup_flag::known || m.size() != 40 + kId * u64{count}) return {};
    const auto found = look_up(store, load_be<u64>(&m[24]), m.subspan(40), flags);
    return found ? std::optional(encode_found(m, keyed_opcode::lookup_result, *found)) : std::nullopt;
}

struct Publish {
    u64 tenant;
    u32 flags;
    std::vector<PublishItem> items;
};

std::optional<Publish> parse_publish(std::span<const u8> m, const StoreGrant& grant) {
    if (m.size() < 40 || m.size() > longest(grant) || load_be<u16>(&m[2]) != 0) return {};
    Publish publish{load_be<u64>(&m[24]), load_be<u32>(&m[32]), {}};
    const u32 count = load_be<u32>(&m[36]);
    if (publish.flags & ~publish_flag::known || m.size() != 40 + kPublishItem * u64{count}) return {};
    publish.items.resize(count);
    const u8* at = m.data() + 40;
    for (PublishItem& item : publish.items) {
        std::copy_n(at, kId, item.id.begin());
        item.handle = load_be<u64>(at + 16);
        item.generation = load_be<u16>(at + 24);
        item.crc = load_be<u32>(at + 28);
        item.flags = 0;
        at += kPublishItem;
    }
    return publish;
}

std::vector<u8> encode_published(std::span<const u8> m, std::span<const PublishResult> results) {
    auto out = answer_head(m, keyed_opcode::publish_result, kHeader + 4 + kPublishResult * results.size());
    store_be<u32>(&out[24], static_cast<u32>(results.size()));
    u8* at = out.data() + kHeader + 4;
    for (const PublishResult& result : results) {
        store_be<u16>(at, result.status >= status::is_committing ? status::busy : result.status);
        store_be<u16>(at + 2, result.generation);
        store_be<u64>(at + 4, result.handle);
        at += kPublishResult;
    }
    return out;
}

std::optional<std::vector<u8>> answer_publish(const KeyedSession& session, const StoreGrant& grant, std::span<const u8> m) {
    const auto publish = parse_publish(m, grant);
    if (!publish) return {};
    std::vector<PublishResult> results(publish->items.size(), PublishResult{kNoHandle, status::undecided, 0, 0});
    if (!session.store->publish_now(grant, session.space, publish->tenant, publish->flags, publish->items, results.data())) return {};
    return encode_published(m, results);
}

std::optional<std::vector<u8>> answer_remove(KeyedStore& store, std::span<const u8> m) {
    if (m.size() < 36 || store.has_disk() || store.has_siblings()) return {};
    const u64 tenant = load_be<u64>(&m[24]);
    const u32 count = load_be<u32>(&m[32]);
    if (m.size() != 36 + kId * u64{count}) return {};
    const u64 removed = store.remove(tenant, m.subspan(36), false, nullptr);
    auto out = answer_head(m, opcode::completion, kAnswer);
    store_be<u32>(&out[24], static_cast<u32>(removed));
    return out;
}

}  // namespace

bool is_foreign(const KeyedSession& session, std::span<const u8> message) {
    return session.tenants && (message.size() < kHeader + 8 || !session.may_use(load_be<u64>(&message[kHeader])));
}

std::vector<u64> named_handles(std::span<const u8> message, const StoreGrant& grant) {
    const auto publish = parse_publish(message, grant);
    std::vector<u64> handles;
    if (publish)
        for (const PublishItem& item : publish->items) handles.push_back(item.handle);
    return handles;
}

std::vector<u8> answer_late_publish(const KeyedSession& session, const StoreGrant& grant, std::span<const u8> message) {
    const Publish publish = *parse_publish(message, grant);
    std::vector<PublishResult> results(publish.items.size(), PublishResult{kNoHandle, status::undecided, 0, 0});
    session.store->publish(grant, session.space, publish.tenant, publish.flags, publish.items, results.data());
    return encode_published(message, results);
}

std::optional<Get> look_up_get(const KeyedSession& session, const StoreGrant& grant, std::span<const u8> m) {
    if (!is_plain(grant, m) || is_foreign(session, m) || m.size() < kGetHead) return {};
    const u32 flags = load_be<u32>(&m[32]), count = load_be<u32>(&m[36]);
    if (flags & ~(lookup_flag::promote | lookup_flag::touch) || m.size() != kGetHead + kGetItem * u64{count}) return {};
    Get get{load_be<u32>(&m[40]), std::vector<Get::Item>(count), {}};
    std::vector<u8> ids(kId * count);
    const u8* at = m.data() + kGetHead;
    for (u32 i = 0; i < count; ++i, at += kGetItem) {
        std::copy_n(at, kId, &ids[kId * i]);
        get.items[i] = {load_be<u64>(at + 16), load_be<u32>(at + 24)};
    }
    auto found = look_up(*session.store, load_be<u64>(&m[24]), ids, flags);
    if (!found) return {};
    get.found = std::move(*found);
    return get;
}

std::vector<u8> answer_get(const Get& get, std::span<const u8> message) {
    return encode_found(message, keyed_opcode::get_result, get.found);
}

std::optional<std::vector<u8>> answer_keyed(const KeyedSession& session, const StoreGrant& grant, std::span<const u8> message) {
    if (!is_plain(grant, message) || is_foreign(session, message)) return {};
    switch (message[1]) {
        case keyed_opcode::lookup:
            return answer_lookup(*session.store, message);
        case keyed_opcode::publish:
            return answer_publish(session, grant, message);
        case keyed_opcode::remove:
            return answer_remove(*session.store, message);
        default:
            return {};
    }
}

}  // namespace kbtp

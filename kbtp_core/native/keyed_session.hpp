// The keyed messages of one session that need no interpreter: LOOKUP, GET, PUBLISH and REMOVE, as octets (protocol/keyed.py has them all).
#pragma once

#include <algorithm>

#include "keyed_store.hpp"

namespace kbtp {

namespace keyed_opcode {
inline constexpr u8 lookup = 0x80, lookup_result = 0x81, publish = 0x82, publish_result = 0x83, remove = 0x84, get = 0x90,
                    get_result = 0x91;
}

// What a session's messages mean beside their octets. `space` is set by the software target while no message of the session is here.
struct KeyedSession {
    std::shared_ptr<KeyedStore> store;
    std::optional<std::vector<u64>> tenants{};  // whose values it may use, sorted; nothing: everybody's
    Space space{};

    bool may_use(u64 tenant) const { return !tenants || std::binary_search(tenants->begin(), tenants->end(), tenant); }
};

// Nothing: the message is for the software target, and nothing has happened. That is so of what the session may not do.
std::optional<std::vector<u8>> answer_keyed(const KeyedSession& session, const StoreGrant& grant, std::span<const u8> message);

// A GET: a LOOKUP that says where the values go.
struct Get {
    struct Item {
        u64 offset;
        u32 room;
    };
    u32 stag;
    std::vector<Item> items;
    std::vector<LookupItem> found;
};
inline constexpr u8 kGetWritten = 4;  // in the flags of a result: the value was written to its place before
// Nothing, as for `answer_keyed`.
std::optional<Get> look_up_get(const KeyedSession& session, const StoreGrant& grant, std::span<const u8> message);
std::vector<u8> answer_get(const Get& get, std::span<const u8> message);

// Whether a LOOKUP, a PUBLISH or a REMOVE names a tenant whose values the session may not use.
bool is_foreign(const KeyedSession& session, std::span<const u8> message);
// The handles that a PUBLISH names; none if it is not well-formed.
std::vector<u64> named_handles(std::span<const u8> message, const StoreGrant& grant);
// A well-formed PUBLISH that waited for its stores: an item that would have to wait longer is BUSY.
std::vector<u8> answer_late_publish(const KeyedSession& session, const StoreGrant& grant, std::span<const u8> message);

}  // namespace kbtp

// The keyed messages of one session that need no interpreter: LOOKUP, PUBLISH and REMOVE, as octets (protocol/keyed.py has them all).
#pragma once

#include <functional>

#include "keyed_store.hpp"

namespace kbtp {

namespace keyed_opcode {
inline constexpr u8 lookup = 0x80, lookup_result = 0x81, publish = 0x82, publish_result = 0x83, remove = 0x84;
}

// What a session's messages mean beside their octets. `space` is set by the software target while no message of the session is here.
struct KeyedSession {
    std::shared_ptr<KeyedStore> store;
    Space space;
};

// The handles that a PUBLISH names are looked at before anything is done: `may_name(index)` says whether that one may be taken now.
// Nothing: the message is for the software target, and nothing has happened.
std::optional<std::vector<u8>> answer_keyed(const KeyedSession& session, const StoreGrant& grant, std::span<const u8> message,
                                            const std::function<bool(u64 handle)>& may_name);

// The items of a PUBLISH, from the wire.
void decode_publish_items(std::span<const u8> octets, std::span<PublishItem> out);

}  // namespace kbtp

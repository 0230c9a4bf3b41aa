#include "executor_session.hpp"

namespace kbtp {
namespace {

constexpr u16 kMalformed = 1;
constexpr std::size_t kParkedMost = 64;  // each is a copy of its message; more wait where they were received

bool accepts(const Request& r, const Entry& e) { return r.generation == 0 || r.generation == e.generation; }

}  // namespace

std::optional<Work> ExecutorSession::take(std::span<const u8> message, bool is_up, bool may_read) {
    if (has_unsettled())
        if (auto answer = duplicate(message)) return answer;
    if (is_up || executor_->is_stopped()) return {};
    if (grant_ && grant_->keyed && message.size() >= kHeader && message[1] >= keyed_opcode::lookup) return keyed(message);
    const auto request = Request::parse(message);
    if (!request) return {};
    switch (request->opcode) {
        case opcode::load:
            return load(*request);
        case opcode::store:
            return store(*request, may_read);
        case opcode::alloc_store:
            return alloc_store(*request, may_read);
        default:
            return free(*request);
    }
}

// Rule 4. The software target could not tell: it has not heard of that store.
std::optional<Work> ExecutorSession::duplicate(std::span<const u8> message) const {
    const bool is_plain = message.size() >= kHeader && message[1] >= opcode::load && message[1] <= opcode::bind;
    const bool is_keyed = message.size() >= kHeader && grant_ && grant_->keyed && message[1] >= keyed_opcode::lookup;
    if ((!is_plain && !is_keyed) || message[0] != 1) return {};
    Request named{};
    named.id = load_be<u64>(&message[4]);
    if (!store_ids_.contains(named.id)) return {};
    named.handle = load_be<u64>(&message[12]);
    const auto at = executor_->index_of(named.handle);
    Work work{.kind = Work::Kind::answer, .answer = encode_answer(named, at ? executor_->entry(*at) : Entry{}, false)};
    store_be<u16>(&work.answer[22], kMalformed);
    return work;
}

std::optional<Work> ExecutorSession::keyed(std::span<const u8> message) {
    const KeyedSession& session = *grant_->keyed;
    if (is_foreign(session, message)) return {};
    if (message[1] == keyed_opcode::publish) {
        const auto named = named_handles(message, *grant_);
        bool is_early = false;
        for (const u64 handle : named) {
            const auto index = executor_->index_of(handle);
            is_early = is_early || (index && is_unsettled(*index));
        }
        if (is_early) {
            // Only the software target waits for the disk.
            if (parked_.size() >= kParkedMost || !session.store->may_park(load_be<u64>(&message[24]), load_be<u32>(&message[32])) ||
                executor_->clears_at_length())
                return {};
            parked_.emplace_back(message.begin(), message.end());
            store_ids_.insert(load_be<u64>(&message[4]));
            for (const u64 handle : named)
                if (const auto index = executor_->index_of(handle)) parked_entries_.insert(*index);
            return Work{.kind = Work::Kind::parked, .opcode = message[1]};
        }
    }
    if (message[1] == keyed_opcode::get) return get(message);
    auto answer = answer_keyed(session, *grant_, message);
    if (!answer) return {};
    return Work{.kind = Work::Kind::answer, .opcode = message[1], .octets = std::make_shared<const std::vector<u8>>(std::move(*answer))};
}

// What is in memory and fits is written; the rest is told where it is, as by a LOOKUP.
std::optional<Work> ExecutorSession::get(std::span<const u8> message) {
    auto get = look_up_get(*grant_->keyed, *grant_, message);
    if (!get) return {};
    Work work{.kind = Work::Kind::answer, .opcode = keyed_opcode::get, .stag = get->stag};
    for (std::size_t i = 0; i < get->found.size(); ++i) {
        LookupItem& found = get->found[i];
        const Get::Item& wanted = get->items[i];
        const auto index = executor_->index_of(found.handle);
        if (found.tier != Tier::ram || !index || writing_count_ >= kMostWriting || wanted.offset + found.length < wanted.offset) continue;
        const Entry entry = executor_->entry(*index);
        if (!entry.is_valid() || !entry.is_sealed() || entry.generation != found.generation || entry.length != found.length) continue;
        if (entry.length == 0 || entry.length > wanted.room || entry.length > executor_->block_bytes()) continue;
        if (entry.block_offset > pool_bytes_ || entry.length > pool_bytes_ - entry.block_offset) continue;
        if (!executor_->begin_read(*index, entry)) continue;
        work.parts.push_back({*index, entry.block_offset, wanted.offset, entry.length});
        found.flags |= kGetWritten;
        ++writing_count_;
    }
    work.octets = std::make_shared<const std::vector<u8>>(answer_get(*get, message));
    return work;
}

std::optional<Work> ExecutorSession::unpark() {
    if (parked_.empty()) return {};
    const std::vector<u8>& message = parked_.front();
    const auto named = named_handles(message, *grant_);
    for (const u64 handle : named)
        if (const auto index = executor_->index_of(handle); index && unsettled_.contains(*index)) return {};
    for (const u64 handle : named)
        if (const auto index = executor_->index_of(handle)) parked_entries_.erase(parked_entries_.find(*index));
    store_ids_.erase(load_be<u64>(&message[4]));
    auto octets = std::make_shared<const std::vector<u8>>(answer_late_publish(*grant_->keyed, *grant_, message));
    const u8 opcode = message[1];
    parked_.pop_front();
    return Work{.kind = Work::Kind::answer, .opcode = opcode, .octets = std::move(octets)};
}

// Of a session that may use the values of some tenants only, what is no value of the store is for the software target, which knows whose
// it is.
bool ExecutorSession::may_name(u64 index) const {
    return !grant_ || !grant_->keyed || !grant_->keyed->tenants || grant_->keyed->store->has_entry(index);
}

bool ExecutorSession::may_read(u64 index) const {
    return !grant_ || !grant_->keyed || !grant_->keyed->tenants || grant_->keyed->may_use(grant_->keyed->store->tenant_of_read(index));
}

std::optional<Work> ExecutorSession::load(const Request& r) {
    const auto index = executor_->index_of(r.handle);
    if (!index || is_unsettled(*index)) return {};
    if (!is_own(r.handle) && !may_name(*index)) return {};
    const Entry entry = executor_->entry(*index);
    if (!entry.is_valid() || !accepts(r, entry) || (!entry.is_sealed() && !r.allows_unsealed())) return {};
    if (entry.length == 0 || entry.length > r.length || entry.length > executor_->block_bytes()) return {};
    if (entry.block_offset > pool_bytes_ || entry.length > pool_bytes_ - entry.block_offset) return {};
    if (r.offset + entry.length < r.offset) return {};
    if (!executor_->begin_read(*index, entry)) return {};
    if (!is_own(r.handle) && !may_read(*index)) {
        executor_->end_read(*index);
        return {};
    }
    ++writing_count_;
    const bool snapshot = !entry.is_sealed();
    if (snapshot) unsettled_.emplace(*index, Unsettled{});
    return Work{.kind = Work::Kind::load,
                .opcode = opcode::load,
                .entry = *index,
                .block_offset = entry.block_offset,
                .length = entry.length,
                .stag = r.stag,
                .offset = r.offset,
                .invalidate = r.invalidates(),
                .snapshot = snapshot,
                .answer = encode_answer(r, entry, true)};
}

void ExecutorSession::load_sent(u64 entry, bool is_snapshot) {
    executor_->end_read(entry);
    --writing_count_;
    if (is_snapshot) unsettled_.erase(entry);
}

std::optional<Work> ExecutorSession::store(const Request& r, bool may_read) {
    const auto index = executor_->index_of(r.handle);
    if (!index || !is_own(r.handle) || is_unsettled(*index)) return {};
    const Entry entry = executor_->entry(*index);
    if (!entry.is_valid() || entry.is_sealed() || !accepts(r, entry) || !has_size(r)) return {};
    // A load that the software target has answered may still wait for its turn to send what the block holds now.
    if (executor_->readers(*index) > 0) return {};
    if (!r.is_inline()) return may_read ? std::optional(read(r, *index, entry.block_offset)) : std::nullopt;
    if (r.inlined.size() > grant_->inline_bytes) return {};
    return finish(r, *index, entry.block_offset);
}

std::optional<Work> ExecutorSession::alloc_store(const Request& r, bool may_read) {
    const auto index = executor_->index_of(r.handle);
    if (!index || !is_own(r.handle) || is_unsettled(*index)) return {};
    const Entry entry = executor_->entry(*index);
    if (entry.is_valid() || !executor_->is_idle(*index) || !accepts(r, entry) || !has_size(r)) return {};
    if (r.is_inline() ? r.inlined.size() > grant_->inline_bytes : !may_read) return {};
    const auto block_offset = executor_->take(*grant_, *index);
    if (!block_offset) return {};
    return r.is_inline() ? finish(r, *index, *block_offset) : read(r, *index, *block_offset);
}

std::optional<Work> ExecutorSession::free(const Request& r) {
    const auto index = executor_->index_of(r.handle);
    if (!index || !is_own(r.handle) || is_unsettled(*index) || executor_->clears_at_length()) return {};
    const Entry entry = executor_->entry(*index);
    if (!entry.is_valid() || !accepts(r, entry) || !executor_->free(*grant_, *index)) return {};
    return Work{.kind = Work::Kind::answer, .opcode = opcode::free, .answer = encode_answer(r, executor_->entry(*index), false)};
}

Work ExecutorSession::read(const Request& r, u64 index, u64 block_offset) {
    unsettled_.emplace(index, Unsettled{r, block_offset});
    store_ids_.insert(r.id);
    return {.kind = Work::Kind::read,
            .opcode = r.opcode,
            .entry = index,
            .block_offset = block_offset,
            .length = r.length,
            .stag = r.stag,
            .offset = r.offset};
}

// The data of a store is there, inline or in its block.
Work ExecutorSession::finish(const Request& r, u64 index, u64 block_offset) {
    if (r.is_inline()) std::memcpy(executor_->block(block_offset), r.inlined.data(), r.inlined.size());
    if (r.opcode == opcode::alloc_store)
        executor_->bind(*grant_, index, block_offset, r.length, r.seals());
    else
        executor_->update(index, r.length, r.seals());
    return {.kind = Work::Kind::answer,
            .opcode = r.opcode,
            .stag = r.invalidates() ? r.stag : 0,
            .invalidate = r.invalidates(),
            .answer = encode_answer(r, executor_->entry(index), true)};
}

Work ExecutorSession::store_arrived(u64 entry) {
    const Unsettled done = unsettled_.extract(entry).mapped();
    store_ids_.erase(done.store->id);
    return finish(*done.store, entry, done.block_offset);
}

// A bound block that a store was half done with keeps what it holds; the software target frees it with the session. In the block of an
// ALLOC_STORE there is what its Read brought, if it was sent, and nothing else: blocks of a pool that clears them are clear when they are
// taken. So there is little to clear even for a peer that leaves with many stores under way.
void ExecutorSession::give_up() {
    for (const auto& [index, unsettled] : unsettled_) {
        if (!unsettled.store || unsettled.store->opcode != opcode::alloc_store) continue;
        executor_->untake(*grant_, index, unsettled.block_offset, unsettled.is_asked ? unsettled.store->length : 0);
    }
    unsettled_.clear();
    store_ids_.clear();
    parked_.clear();
    parked_entries_.clear();
}

}  // namespace kbtp

#include "client_calls.hpp"

#include <algorithm>
#include <cstring>

#include "keyed_session.hpp"

namespace kbtp {
namespace {

constexpr u8 kGetRights = access::local_write | access::remote_write, kPutRights = access::remote_read;

}  // namespace

u64 ValuePlaces::total(std::size_t value) const {
    u64 sum = 0;
    for (std::size_t p = value * pieces(); p < (value + 1) * pieces(); ++p) sum += lengths[p];
    return sum;
}

bool ValuePlaces::has_equal_pieces() const {
    return !lengths.empty() && lengths[0] > 0 && std::all_of(lengths.begin(), lengths.end(), [&](u32 n) { return n == lengths[0]; });
}

ClientCalls::ClientCalls(std::shared_ptr<QueuePair> pair, std::shared_ptr<HandleCache> cache, StoreOptions options,
                         std::vector<u64> handles)
    : pair_(pair), cache_(std::move(cache)), options_(options), handles_(std::move(handles)), call_(std::move(pair)) {}

// Pages of one region: the peer sees one value behind the other.
void ClientCalls::expose(const ValuePlaces& places, u8 rights) {
    std::vector<u8*> pages(places.addresses.size());
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = reinterpret_cast<u8*>(places.addresses[i]);
    const u64 page_bytes = places.lengths[0], length = page_bytes * pages.size();
    region_ = pair_->regions().add(pair_->pd(), rights, std::move(pages), page_bytes, length);
}

void ClientCalls::close_region() {
    if (region_) pair_->regions().remove(std::exchange(region_, nullptr));
}

bool ClientCalls::prepare_lookup(std::span<const u8> ids, u32 flags) {
    is_asking_ = false;
    batch_ = make_lookups(next_sequence(), options_.tenant, flags, options_.lookup_items, ids);
    return true;
}

bool ClientCalls::finish_lookup(std::span<const u8> ids, std::vector<std::int64_t>& lengths) {
    const auto batch = std::static_pointer_cast<MessageBatch>(call_.ended());
    lengths.assign(ids.size() / 16, 0);
    if (batch->failed() || !batch->is_done()) return false;
    const auto found = lookup_results(*batch, lengths.size(), options_.lookup_items, false);
    for (std::size_t i = 0; i < found.size(); ++i) {
        if (found[i].tier == static_cast<u8>(Tier::absent)) continue;
        lengths[i] = found[i].data_length;
        if (found[i].tier == static_cast<u8>(Tier::ram)) cache_->keep(&ids[16 * i], {found[i].handle, found[i].generation});
    }
    return true;
}

// Value i goes to i * stride_.
bool ClientCalls::make_sink(const ValuePlaces& places) {
    stride_ = 0;
    for (std::size_t i = 0; i < places.count; ++i) {
        const u64 room = places.total(i);
        if (room == 0 || room > ~u32{0}) return false;
        stride_ = std::max(stride_, room);
    }
    uses_desk_ = stride_ * places.count <= kDeskBytes;
    if (!uses_desk_ && !places.has_equal_pieces()) return false;
    if (!uses_desk_) {
        expose(places, kGetRights);
    } else if (!desk_region_) {
        desk_.resize(kDeskBytes);
        desk_region_ = pair_->regions().add(pair_->pd(), kGetRights, {desk_.data()}, desk_.size(), desk_.size());
    }
    return true;
}

bool ClientCalls::prepare_get(std::span<const u8> ids, const ValuePlaces& places) {
    if (!make_sink(places)) return false;
    requests_.assign(places.count, {});
    found_.assign(places.count, {RequestBatch::kNoStatus, 0});
    loaded_.resize(places.count);
    is_asking_ = false;
    for (std::size_t i = 0; i < places.count; ++i) {
        const auto known = cache_->find(&ids[16 * i]);
        is_asking_ = is_asking_ || !known;
        requests_[i] = {known ? known->handle : 0, i * stride_, static_cast<u32>(places.total(i)), known ? known->generation : u16{0}};
        loaded_[i] = i;
    }
    if (!is_asking_) {
        make_loads();
        return true;
    }
    std::vector<u64> offsets(places.count);
    std::vector<u32> rooms(places.count);
    for (std::size_t i = 0; i < places.count; ++i) {
        offsets[i] = requests_[i].offset;
        rooms[i] = requests_[i].length;
    }
    batch_ = make_gets(next_sequence(), options_.tenant, lookup_flag::promote | lookup_flag::touch, options_.get_items, ids, sink(),
                       offsets, rooms);
    return true;
}

void ClientCalls::make_loads() {
    std::vector<LoadRequest> requests;
    for (const std::size_t i : loaded_) requests.push_back(requests_[i]);
    batch_ = std::make_shared<LoadBatch>(next_sequence(), sink(), u16{0}, std::move(requests));
}

std::optional<ClientCalls::Result> ClientCalls::settle_gets(std::span<const u8> ids, const ValuePlaces& places) {
    const auto batch = std::static_pointer_cast<MessageBatch>(call_.ended());
    const auto results = lookup_results(*batch, places.count, options_.get_items, false);
    is_asking_ = false;
    loaded_.clear();
    bool is_usual = batch->failed() == 0;
    for (std::size_t i = 0; i < places.count && is_usual; ++i) {
        const LookupResult& one = results[i];
        if (one.tier == static_cast<u8>(Tier::absent)) {
            found_[i].first = status::not_bound;
            continue;
        }
        is_usual = one.tier == static_cast<u8>(Tier::ram) && one.data_length <= requests_[i].length;
        if (!is_usual) break;
        cache_->keep(&ids[16 * i], {one.handle, one.generation});
        requests_[i].handle = one.handle;
        requests_[i].generation = one.generation;
        if (one.flags & kGetWritten)
            found_[i] = {u16{0}, one.data_length};
        else
            loaded_.push_back(i);
    }
    if (!is_usual) {
        close_region();
        return Result::refused;
    }
    if (loaded_.empty()) return Result::done;
    make_loads();
    return {};
}

bool ClientCalls::prepare_put(std::span<const u8> ids, const ValuePlaces& places, u32 flags) {
    if (places.count > handles_.size()) return false;
    u64 longest = 0;
    for (std::size_t i = 0; i < places.count; ++i) {
        const u64 size = places.total(i);
        if (size == 0 || size > options_.block_bytes) return false;
        longest = std::max(longest, size);
    }
    std::vector<u64> offsets;
    u32 stag = 0;
    if (longest > options_.inline_bytes) {
        if (!places.has_equal_pieces()) return false;
        expose(places, kPutRights);
        stag = region_->stag();
        offsets.resize(places.count);
        for (std::size_t i = 0; i < places.count; ++i) offsets[i] = i * longest;
    }
    used_.assign(handles_.end() - static_cast<std::ptrdiff_t>(places.count), handles_.end());
    handles_.resize(handles_.size() - places.count);
    batch_ = make_puts(next_sequence(), {.tenant = options_.tenant,
                                         .flags = flags,
                                         .inline_bytes = options_.inline_bytes,
                                         .values_each = options_.publish_items,
                                         .stag = stag,
                                         .ids = ids,
                                         .handles = used_,
                                         .addresses = places.addresses,
                                         .offsets = offsets,
                                         .lengths = places.lengths,
                                         .pieces = places.pieces()});
    return true;
}

ClientCalls::Result ClientCalls::begin() {
    const Result result = call_.begin(std::exchange(batch_, nullptr));
    if (result == Result::refused) {
        close_region();
        handles_.insert(handles_.end(), used_.begin(), used_.end());
        used_.clear();
    }
    return result;
}

ClientCalls::Result ClientCalls::resume(TimePoint until) { return call_.resume(until); }

void ClientCalls::give_up() {
    if (!call_.is_running()) return;
    close_region();
    // What still comes for the desk must not meet the next call.
    if (uses_desk_ && desk_region_) pair_->regions().remove(std::exchange(desk_region_, nullptr));
    call_.abandon();
}

ClientCalls::Result ClientCalls::finish_get(std::span<const u8> ids, const ValuePlaces& places, std::vector<u16>& statuses,
                                            std::vector<std::int64_t>& lengths) {
    close_region();
    const auto batch = std::dynamic_pointer_cast<LoadBatch>(call_.ended());  // else GETs alone
    bool is_stale = false;
    for (std::size_t at = 0; batch && at < loaded_.size(); ++at) {
        const LoadResult& result = batch->results()[at];
        const std::size_t i = loaded_[at];
        if (result.status == 0 && result.data_length <= requests_[i].length) {
            found_[i] = {u16{0}, result.data_length};
            continue;
        }
        if (result.status != RequestBatch::kNoStatus) cache_->forget(&ids[16 * i]);
        is_stale = true;
    }
    statuses.resize(places.count);
    lengths.resize(places.count);
    bool is_whole = true;
    for (std::size_t i = 0; i < places.count; ++i) {
        statuses[i] = found_[i].first;
        lengths[i] = found_[i].second;
        is_whole = is_whole && statuses[i] == 0;
        if (statuses[i] == 0 && uses_desk_) scatter(i, found_[i].second, places);
    }
    if (is_whole) return Result::done;
    return is_stale ? Result::refused : Result::partly;
}

// From the desk to the value's pieces.
void ClientCalls::scatter(std::size_t value, u64 size, const ValuePlaces& places) const {
    const u8* from = &desk_[value * stride_];
    for (std::size_t p = value * places.pieces(); size > 0; ++p) {
        const u64 n = std::min<u64>(size, places.lengths[p]);
        if (n > 0) std::memcpy(reinterpret_cast<u8*>(places.addresses[p]), from, n);
        from += n;
        size -= n;
    }
}

bool ClientCalls::finish_put(std::span<const u8> ids, std::vector<PutResult>& results, std::vector<u64>& used) {
    close_region();
    const auto batch = std::static_pointer_cast<MessageBatch>(call_.ended());
    results = put_results(*batch, used_.size(), options_.publish_items);
    if (!std::all_of(results.begin(), results.end(), [](const PutResult& r) { return r.status == 0; })) {
        used = std::exchange(used_, {});
        return false;
    }
    for (std::size_t i = 0; i < results.size(); ++i)
        if (results[i].handle != kNoHandle) cache_->keep(&ids[16 * i], {results[i].handle, results[i].generation});
    handles_.insert(handles_.end(), used_.begin(), used_.end());
    used_.clear();
    return true;
}

}  // namespace kbtp

#include "keyed_store.hpp"

#include <algorithm>
#include <ctime>

namespace kbtp {
namespace {

constexpr u8 kLookDirty = 1, kLookPinned = 2, kLookFenced = 0x80;
constexpr u64 kScanStep = 65536;  // values that one step of a scan looks at, with the lock held

u64 number_bit(u32 number) { return u64{1} << number % 64; }

}  // namespace

KeyedStore::KeyedStore(std::shared_ptr<Executor> executor, KeyedOptions options)
    : executor_(std::move(executor)),
      options_(options),
      values_(options.capacity),
      index_(options.capacity, KeyOf{this}),
      resident_((options.capacity + 63) / 64),
      held_((options.capacity + 63) / 64) {
    free_.reserve(options_.capacity);
    for (u64 number = options_.capacity; number > 0; --number) free_.push_back(static_cast<u32>(number - 1));
    executor_->watch(options_.base_entry, options_.capacity);
    lanes_.resize(1);
}

void KeyedStore::set_lanes(std::vector<u32> points, std::vector<u8> owners, u64 count) {
    std::lock_guard lock(mutex_);
    points_ = std::move(points);
    owners_ = std::move(owners);
    lanes_.resize(std::max<u64>(count, 1));
}

// As cluster/placement.py has it: the first point at or after the key's hash, wrapping.
u8 KeyedStore::lane_of(const ValueKey& key) const {
    if (points_.empty()) return 0;
    const u32 hash = u32{key.id[0]} | u32{key.id[1]} << 8 | u32{key.id[2]} << 16 | u32{key.id[3]} << 24;
    const auto at = std::lower_bound(points_.begin(), points_.end(), hash);
    return owners_[at == points_.end() ? 0 : static_cast<std::size_t>(at - points_.begin())];
}

void KeyedStore::tell_flushers() {
    for (Lane& lane : lanes_)
        if (!lane.dirty.empty()) lane.has_dirty.notify_one();
}

u64 KeyedStore::now_ms() const {
    if (const u64 manual = manual_now_ms_.load()) return manual;
    timespec now{};
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    return static_cast<u64>(now.tv_sec) * 1000 + static_cast<u64>(now.tv_nsec) / 1'000'000;
}

void KeyedStore::set_backing(std::shared_ptr<BackingIndex> backing) {
    std::lock_guard lock(mutex_);
    backing_ = std::move(backing);
}

void KeyedStore::set_limit_of_tenant(u64 tenant, u64 bytes) {
    std::lock_guard lock(mutex_);
    Usage& usage = tenants_[tenant];
    usage.limit = bytes;
    usage.has_limit = bytes != ~u64{0};
}

void KeyedStore::set_default_limit(u64 bytes) {
    std::lock_guard lock(mutex_);
    default_limit_ = bytes;
}

u64 KeyedStore::set_limit(u64 blocks) {
    std::lock_guard lock(mutex_);
    end_leases(now_ms());
    while (used_ > blocks && evict()) {
    }
    limit_ = std::max(blocks, used_);
    return limit_;
}

// --- LOOKUP, REMOVE, PIN --------------------------------------------------------------------------------------------------------

u32 KeyedStore::find(const ValueKey& key) {
    const u32 number = index_.find(key);
    if (number == KeyedIndex<KeyOf>::kNone || !expired(values_[number], now_ms() / 1000)) return number;
    ++counters_.expired;
    leave(number);
    return KeyedIndex<KeyOf>::kNone;
}

u8 KeyedStore::flags_of(const Value& value) const {
    return static_cast<u8>((value.flags & kDirty ? kLookDirty : 0) | (value.pins ? kLookPinned : 0));
}

u64 KeyedStore::lookup(u64 tenant, std::span<const u8> ids, u32 flags, LookupItem* out) {
    std::lock_guard lock(mutex_);
    const u64 count = ids.size() / 16;
    constexpr u64 kAhead = 8;
    for (u64 i = 0; i < count; ++i) {
        if (i + kAhead < count) index_.prefetch(ValueKey::from(tenant, &ids[16 * (i + kAhead)]));
        const ValueKey key = ValueKey::from(tenant, &ids[16 * i]);
        const u32 number = find(key);
        LookupItem& item = out[i] = {kNoHandle, 0, 0, Tier::absent, 0};
        if (number != KeyedIndex<KeyOf>::kNone) {
            const Value& value = values_[number];
            const bool is_resident = value.state == State::resident;
            const u16 generation = executor_->generation(index_of(number));
            item = {handle_of(number), value.length, is_resident ? generation : next_generation(generation),
                    is_resident ? Tier::ram : Tier::promoting, flags_of(value)};
            if (flags & lookup_flag::touch) executor_->touch(index_of(number));
        } else if (is_fenced(key)) {
            item.flags = kLookFenced;
        } else if (backing_) {
            item.length = backing_->length_of(key);
            if (item.length) item.tier = Tier::disk;
        }
        if (item.tier == Tier::absent && flags & lookup_flag::prefix) return i + 1;
    }
    return count;
}

void KeyedStore::note_lookup(std::span<const LookupItem> found) {
    std::lock_guard lock(mutex_);
    for (const LookupItem& item : found) ++(item.tier == Tier::absent ? counters_.misses : counters_.hits);
}

u64 KeyedStore::remove(u64 tenant, std::span<const u8> ids, bool fence, u8* was_there) {
    std::lock_guard lock(mutex_);
    u64 removed = 0;
    for (u64 i = 0; i < ids.size() / 16; ++i) {
        const ValueKey key = ValueKey::from(tenant, &ids[16 * i]);
        if (fence) ++fences_[key];
        const u32 number = find(key);
        const bool is_there = number != KeyedIndex<KeyOf>::kNone;
        if (was_there) was_there[i] = is_there;
        if (!is_there) continue;
        const u8 flags = values_[number].flags;
        if (was_there && flags & kBusy && flags & kDirty) was_there[i] = 2;
        leave(number);
        ++removed;
    }
    counters_.removed += removed;
    return removed;
}

void KeyedStore::unfence(u64 tenant, std::span<const u8> ids) {
    std::lock_guard lock(mutex_);
    for (u64 i = 0; i < ids.size() / 16; ++i) drop_fence(ValueKey::from(tenant, &ids[16 * i]));
    tell_flushers();
}

void KeyedStore::drop_fence(const ValueKey& key) {
    const auto found = fences_.find(key);
    if (found != fences_.end() && --found->second == 0) fences_.erase(found);
}

std::optional<u64> KeyedStore::tenant_of(u64 index) const {
    std::lock_guard lock(mutex_);
    const auto number = number_of(index);
    return number && values_[*number].state != State::free ? std::optional(values_[*number].key.tenant) : std::nullopt;
}

u16 KeyedStore::pin(u64 handle, u16 generation, bool wanted, u32 lease_ms, const std::vector<u64>* tenants) {
    std::lock_guard lock(mutex_);
    const auto index = executor_->index_of(handle);
    const auto number = index ? number_of(*index) : std::nullopt;
    if (!number) return status::not_permitted;
    Value& value = values_[*number];
    if (value.state != State::resident) return status::not_bound;
    if (tenants && !std::binary_search(tenants->begin(), tenants->end(), value.key.tenant)) return status::not_permitted;
    if (generation != 0 && generation != executor_->generation(*index)) return status::stale;
    if (!wanted) {
        if (value.pins && --value.pins == 0) --pinned_count_;
        update_held(*number);
        return status::ok;
    }
    const u64 now = now_ms();
    end_leases(now);
    // What is pinned can't be evicted; half of the store stays for everybody.
    if (value.pins == 0 && 2 * (pinned_count_ + 1) > options_.capacity + 1) return status::no_space;
    pin_until(*number, now + std::min(lease_ms ? lease_ms : options_.default_lease_ms, options_.longest_lease_ms));
    return status::ok;
}

void KeyedStore::pin_until(u32 number, u64 until_ms) {
    Value& value = values_[number];
    if (value.pins == 0) {
        ++pinned_count_;
        value.pinned_until_ms = 0;  // a lease that was ended by UNPIN counts no more
    }
    if (value.pins < 0xffff) ++value.pins;
    value.pinned_until_ms = std::max(value.pinned_until_ms, until_ms);
    push(leases_, {value.pinned_until_ms, number});
    update_held(number);
}

// --- PUBLISH ----------------------------------------------------------------------------------------------------------------------

u16 KeyedStore::check(const StoreGrant& grant, const PublishItem& item, u64& index, Entry& entry) const {
    const auto at = executor_->index_of(item.handle);
    if (!at || item.handle - grant.handle_base >= grant.handle_count) return status::not_permitted;
    index = *at;
    entry = executor_->entry(index);
    if (!entry.is_valid()) return status::not_bound;
    if (item.generation != 0 && item.generation != entry.generation) return status::stale;
    return entry.is_sealed() ? status::ok : status::not_sealed;
}

u64 KeyedStore::publish(const StoreGrant& grant, const Space& space, u64 tenant, u32 flags, std::span<const PublishItem> items,
                        PublishResult* out) {
    std::lock_guard lock(mutex_);
    u64 undecided = 0;
    for (u64 i = 0; i < items.size(); ++i)
        if (out[i].status >= status::is_committing) {
            out[i] = decide(grant, space, tenant, flags, items[i], false);
            undecided += out[i].status >= status::is_committing;
        }
    tell_flushers();
    return undecided;
}

bool KeyedStore::publish_now(const StoreGrant& grant, const Space& space, u64 tenant, u32 flags, std::span<const PublishItem> items,
                             PublishResult* out) {
    if (executor_->clears_at_length()) return false;
    std::lock_guard lock(mutex_);
    if (has_disk() && (!backing_ || waits_for_disk(tenant, flags))) return false;
    // All blocks are claimed first, so that none is found to be read when others were adopted already.
    u64 claimed = 0;
    bool all = true;
    std::vector<u64> claims(items.size(), kNoHandle);
    for (; all && claimed < items.size(); ++claimed) {
        Entry entry{};
        u64 index = 0;
        if (check(grant, items[claimed], index, entry) != status::ok) continue;
        const u32 winner = find(ValueKey::from(tenant, items[claimed].id.data()));
        all = (winner == KeyedIndex<KeyOf>::kNone || !(values_[winner].flags & kCommitting)) && executor_->claim(index);
        if (all) claims[claimed] = index;
    }
    for (u64 i = 0; i < items.size() && all; ++i) {
        out[i] = decide(grant, space, tenant, flags, items[i], claims[i] != kNoHandle);
        if (out[i].status == status::ok || out[i].status == status::already_bound) claims[i] = kNoHandle;  // it was let go
    }
    for (const u64 index : claims)
        if (index != kNoHandle) executor_->drop_claim(index);
    tell_flushers();
    return all;
}

PublishResult KeyedStore::decide(const StoreGrant& grant, const Space& space, u64 tenant, u32 flags, const PublishItem& item,
                                 bool is_claimed) {
    const auto refused = [](u16 why) { return PublishResult{kNoHandle, why, 0, 0}; };
    u64 index = 0;
    Entry entry{};
    if (const u16 wrong = check(grant, item, index, entry); wrong != status::ok) return refused(wrong);
    const ValueKey key = ValueKey::from(tenant, item.id.data());
    if (const u32 winner = find(key); winner != KeyedIndex<KeyOf>::kNone) {
        if (values_[winner].flags & kCommitting) return refused(status::is_committing);
        return lost(grant, index, winner, item, is_claimed);
    }
    const bool is_on_disk = !is_fenced(key) && (item.is_on_disk() || (backing_ && backing_->length_of(key)));
    if (is_on_disk) return lost(grant, index, KeyedIndex<KeyOf>::kNone, item, is_claimed);
    if (const u16 full = make_room(key, entry.length); full != status::ok) return refused(full);
    u64 block_offset = entry.block_offset;
    if (item.is_copied()) {
        const auto copy = executor_->allocate();
        if (!copy) return refused(status::no_space);
        block_offset = *copy;
        std::memcpy(executor_->block(block_offset), executor_->block(entry.block_offset), entry.length);
    } else {
        if (!is_claimed && !executor_->claim(index)) return refused(status::is_read);
        executor_->hand_over(grant, index);
        executor_->drop_claim(index);
    }
    const u32 number = take_number(key);
    Value& value = values_[number];
    value.block_offset = block_offset;
    set_state(number, State::resident);
    value.length = entry.length;
    value.crc = item.crc;
    charge(tenant, value.length);
    note(number, space, tenant, flags);
    executor_->name(index_of(number), options_.owner, block_offset, value.length);
    ++counters_.published;
    return {handle_of(number), status::ok, executor_->generation(index_of(number)), (value.flags & kCommitting) != 0};
}

// The key has a value: that one stays, and the block goes back to the ring.
PublishResult KeyedStore::lost(const StoreGrant& grant, u64 index, u32 winner, const PublishItem& item, bool is_claimed) {
    PublishResult result{kNoHandle, status::already_bound, 0, 0};
    if (!item.is_copied()) {
        if (!is_claimed && !executor_->claim(index)) return {kNoHandle, status::is_read, 0, 0};
        executor_->free_claimed(grant, index);
    }
    ++counters_.lost_races;
    if (winner == KeyedIndex<KeyOf>::kNone) return result;
    const u16 generation = executor_->generation(index_of(winner));
    result.handle = handle_of(winner);
    result.generation = values_[winner].state == State::resident ? generation : next_generation(generation);
    return result;
}

void KeyedStore::note(u32 number, const Space& space, u64 tenant, u32 flags) {
    Value& value = values_[number];
    value.space = space.tenant == tenant ? space.id : 0;
    const u64 now = now_ms();
    if (space.tenant == tenant && space.ttl_s) {
        value.expiry_s = static_cast<u32>(std::min<u64>(now / 1000 + space.ttl_s, 0xffff'ffff));
        push(lifetimes_, {value.expiry_s, number});
    }
    if (has_disk()) {
        value.flags |= kDirty;
        ++dirty_count_;
        ++lanes_[value.lane].dirty_count;
        if (waits_for_disk(tenant, flags)) value.flags |= kCommitting;
        if (options_.writes_around) value.flags |= kThrough;
        lanes_[value.lane].dirty.push(number);
    }
    update_held(number);
    if (flags & publish_flag::pin && 2 * (pinned_count_ + 1) <= options_.capacity + 1) pin_until(number, now + options_.default_lease_ms);
}

u64 KeyedStore::limit_of(u64 tenant) const {
    const auto found = tenants_.find(tenant);
    return found != tenants_.end() && found->second.has_limit ? found->second.limit : default_limit_;
}

// A tenant with a limit hears of it from the disk tier, which counts what it has there.
bool KeyedStore::waits_for_disk(u64 tenant, u32 flags) const {
    return flags & publish_flag::durable || options_.writes_around || options_.acks_on_disk || limit_of(tenant) != ~u64{0};
}

bool KeyedStore::may_park(u64 tenant, u32 flags) const {
    std::lock_guard lock(mutex_);
    return !has_disk() || (backing_ && !waits_for_disk(tenant, flags));
}

// Room for one more block of `length` octets for this key, by eviction if need be; or why there is none.
u16 KeyedStore::make_room(const ValueKey& key, u32 length) {
    const u64 tenant = key.tenant;
    if (has_disk() && (dirty_count_ >= options_.dirty_limit || lanes_[lane_of(key)].dirty_count >= lane_share(options_.dirty_limit))) {
        ++counters_.refused_dirty;
        return status::no_space;
    }
    // With a disk the tenant's octets there are what counts, and the disk tier counts them.
    if (!has_disk() && bytes_of(tenant) + length > limit_of(tenant)) {
        ++counters_.refused_quota;
        return status::no_space;
    }
    if (used_ < limit_ || evict()) return status::ok;
    tick_locked();
    if (used_ < limit_ || evict()) return status::ok;
    ++counters_.refused_full;
    return status::no_space;
}

u64 KeyedStore::bytes_of(u64 tenant) const {
    const auto found = tenants_.find(tenant);
    return found == tenants_.end() ? 0 : found->second.bytes;
}

void KeyedStore::discharge(u64 tenant, u64 bytes) {
    const auto found = tenants_.find(tenant);
    found->second.bytes -= bytes;
    if (found->second.bytes == 0 && !found->second.has_limit) tenants_.erase(found);
}

// --- eviction and what leaves ----------------------------------------------------------------------------------------------------

// The hand moves over the values, a word of 64 at a time: the first that was not read since it came by goes, and those that it passes
// lose their marks. After two rounds every value that may go was tried.
bool KeyedStore::evict() {
    if (resident_count_ == held_count_) return false;
    const u64 words = resident_.size();
    for (u64 step = 0; step < 2 * words + 1; ++step) {
        const u64 word = hand_ / 64;
        const u64 candidates = resident_[word] & ~held_[word] & ~u64{0} << hand_ % 64;
        u64 victims = candidates & ~executor_->recent(word).load(std::memory_order_relaxed);
        for (; victims; victims &= victims - 1) {
            const u32 number = static_cast<u32>(64 * word + static_cast<u64>(__builtin_ctzll(victims)));
            if (!executor_->claim(index_of(number))) continue;
            executor_->recent(word).fetch_and(~(candidates & (number_bit(number) - 1)), std::memory_order_relaxed);
            free_resident(number);
            hand_ = (number + 1) % options_.capacity;
            ++counters_.evicted;
            return true;
        }
        if (candidates) executor_->recent(word).fetch_and(~candidates, std::memory_order_relaxed);
        hand_ = 64 * ((word + 1) % words);
    }
    return false;
}

// The value is resident, and its entry claimed.
void KeyedStore::free_resident(u32 number) {
    Value& value = values_[number];
    const u64 index = index_of(number);
    index_.erase(value.key);
    discharge(value.key.tenant, value.length);
    executor_->clear(index);
    executor_->release(value.block_offset);
    set_state(number, State::free);
    executor_->drop_claim(index);
}

// A number for a new value, which the caller gives a block and a state.
u32 KeyedStore::take_number(const ValueKey& key) {
    const u32 number = free_.back();  // as many numbers as blocks, and a block is at hand
    free_.pop_back();
    values_[number] = Value{};
    values_[number].key = key;
    values_[number].lane = lane_of(key);
    index_.insert(key, number);
    executor_->recent(number / 64).fetch_and(~number_bit(number), std::memory_order_relaxed);
    ++used_;
    return number;
}

// It can't be found any more, nor loaded; its block stays until nobody uses it.
void KeyedStore::leave(u32 number) {
    Value& value = values_[number];
    index_.erase(value.key);
    discharge(value.key.tenant, value.length);
    if (value.flags & kCommitting) settled_.push_back({index_of(number), executor_->generation(index_of(number)), status::not_bound, 0});
    if (value.flags & kBusy && value.flags & kDirty) ++fences_[value.key];  // until the caller of `flushed` has taken it off the disk
    if (value.flags & kDirty) --dirty_count_, --lanes_[value.lane].dirty_count;
    if (value.pins) --pinned_count_;
    value.pins = 0;
    value.flags &= kBusy;
    if (value.state == State::promoting)
        executor_->skip(index_of(number));
    else
        executor_->clear(index_of(number));
    set_state(number, State::leaving);
    if (!finish(number)) leaving_.push_back(number);
}

bool KeyedStore::finish(u32 number) {
    if (values_[number].flags & kBusy || executor_->readers(index_of(number)) > 0) return false;
    executor_->let_idle(index_of(number));
    executor_->release(values_[number].block_offset);
    set_state(number, State::free);
    return true;
}

void KeyedStore::set_bit(std::vector<u64>& bits, u32 number, bool on) {
    if (on)
        bits[number / 64] |= number_bit(number);
    else
        bits[number / 64] &= ~number_bit(number);
}

// Move a value to a state, and everything that counts states with it.
void KeyedStore::set_state(u32 number, State state) {
    Value& value = values_[number];
    if (value.state == State::resident) {
        --resident_count_;
        if (bit(held_, number)) --held_count_;
        set_bit(resident_, number, false);
        set_bit(held_, number, false);
    }
    promoting_count_ -= value.state == State::promoting;
    value.state = state;
    promoting_count_ += state == State::promoting;
    if (state == State::resident) {
        ++resident_count_;
        set_bit(resident_, number, true);
        update_held(number);
    } else if (state == State::free) {
        --used_;
        free_.push_back(number);
    }
    if (state == State::promoting || state == State::leaving)
        executor_->keep(index_of(number), value.block_offset, state == State::leaving);
}

void KeyedStore::update_held(u32 number) {
    const Value& value = values_[number];
    if (value.state != State::resident) return;
    const bool held = value.pins || value.flags & (kDirty | kBusy);
    if (held == bit(held_, number)) return;
    set_bit(held_, number, held);
    held_count_ += held ? 1 : u64(-1);
}

u64 KeyedStore::tick() {
    std::lock_guard lock(mutex_);
    return tick_locked();
}

u64 KeyedStore::tick_locked() {
    const u64 now = now_ms();
    end_leases(now);
    end_values(now);
    std::erase_if(leaving_, [this](u32 number) { return finish(number); });
    return leaving_.size();
}

void KeyedStore::end_leases(u64 now) {
    for (; !leases_.empty() && leases_.top().at <= now; leases_.pop()) {
        const u32 number = leases_.top().number;
        Value& value = values_[number];
        if (!value.pins || value.pinned_until_ms > now) continue;
        value.pins = 0;
        --pinned_count_;
        update_held(number);
    }
}

void KeyedStore::end_values(u64 now) {
    for (; !lifetimes_.empty() && lifetimes_.top().at <= now / 1000; lifetimes_.pop()) {
        const u32 number = lifetimes_.top().number;
        const State state = values_[number].state;
        if ((state != State::resident && state != State::promoting) || !expired(values_[number], now / 1000)) continue;
        ++counters_.expired;
        leave(number);
    }
}

void KeyedStore::push(Deadlines& heap, Deadline deadline) {
    if (heap.size() < 2 * options_.capacity) return heap.push(deadline);
    std::vector<Deadline> due;
    for (u32 number = 0; number < options_.capacity; ++number)
        if (const Deadline one = deadline_of(heap, number); one.at) due.push_back(one);
    heap = Deadlines({}, std::move(due));  // `deadline` is a value's that is noted already
}

KeyedStore::Deadline KeyedStore::deadline_of(const Deadlines& heap, u32 number) const {
    const Value& value = values_[number];
    if (value.state == State::free || value.state == State::leaving) return {0, number};
    return {&heap == &leases_ ? (value.pins ? value.pinned_until_ms : 0) : value.expiry_s, number};
}

// --- namespaces and lists ---------------------------------------------------------------------------------------------------------

u64 KeyedStore::remove_space(u64 tenant, u64 space, u64 cursor, u64 lane, u64& removed) {
    std::lock_guard lock(mutex_);
    const u64 end = std::min(options_.capacity, cursor + kScanStep);
    for (u64 at = cursor; at < end; ++at) {
        const Value& value = values_[at];
        if ((value.state != State::resident && value.state != State::promoting) || value.key.tenant != tenant) continue;
        if (lane != kAllLanes && value.lane != lane) continue;
        // Of what was read from disk the namespace isn't known, and the disk has it.
        const bool is_read = value.flags & kRead || value.state == State::promoting;
        if (!is_read && value.space != space) continue;
        if (!has_disk() || value.flags & kDirty) {
            ++removed;
            ++counters_.removed;
        }
        leave(static_cast<u32>(at));
    }
    return end < options_.capacity ? end : 0;
}

u64 KeyedStore::list(u64 tenant, u64 space, u64 cursor, std::span<ListItem> out, u64& count) {
    std::lock_guard lock(mutex_);
    const u64 now_s = now_ms() / 1000, end = std::min(options_.capacity, std::min(cursor, options_.capacity) + kScanStep);
    u64 at = cursor;
    for (count = 0; at < end && count < out.size(); ++at) {
        const Value& value = values_[at];
        if (value.state != State::resident || value.key.tenant != tenant || (space && value.space != space) || expired(value, now_s))
            continue;
        const u32 left = value.expiry_s ? value.expiry_s - static_cast<u32>(now_s) : 0;
        out[count++] = {value.key.id, value.length, left, static_cast<u8>(Tier::ram), flags_of(value), 0};
    }
    return at < options_.capacity ? at : 0;
}

}  // namespace kbtp

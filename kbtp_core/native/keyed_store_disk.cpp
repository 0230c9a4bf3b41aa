// The RAM tier's half of the disk tier: values on their way there and back, and what is known of the whole.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "keyed_store.hpp"

namespace kbtp {

// --- to the disk -----------------------------------------------------------------------------------------------------------------

u64 KeyedStore::take_dirty(u64 which, std::span<DiskItem> out, double wait_s) {
    std::unique_lock lock(mutex_);
    Lane& lane = lanes_[which];
    std::queue<u32>& dirty = lane.dirty;
    if (wait_s > 0) lane.has_dirty.wait_for(lock, std::chrono::duration<double>(wait_s), [&] { return !dirty.empty() || is_waking_; });
    is_waking_ = false;
    u64 count = 0;
    for (u64 left = dirty.size(); left > 0 && count < out.size(); --left) {
        const u32 number = dirty.front();
        dirty.pop();
        Value& value = values_[number];
        if (value.state != State::resident || !(value.flags & kDirty) || value.flags & kBusy) continue;  // it left, or is under way
        if (is_fenced(value.key)) {
            dirty.push(number);
            continue;
        }
        value.flags |= kBusy;
        const u64 address = reinterpret_cast<u64>(executor_->block(value.block_offset));
        out[count++] = {value.key,
                        value.space,
                        address,
                        handle_of(number),
                        number,
                        value.length,
                        value.crc,
                        value.expiry_s,
                        executor_->generation(index_of(number)),
                        status::undecided,
                        0};
    }
    return count;
}

void KeyedStore::flushed(std::span<DiskItem> items) {
    std::lock_guard lock(mutex_);
    for (DiskItem& item : items) {
        Value& value = values_[item.number];
        value.flags &= static_cast<u8>(~kBusy);
        item.has_left = value.state == State::leaving;
        if (item.has_left) continue;             // `finish` by the next tick; the fence of `leave` stays for the caller
        if (item.status == status::undecided) {  // try again
            lanes_[value.lane].dirty.push(item.number);
            continue;
        }
        const bool was_committing = value.flags & kCommitting, is_through = value.flags & kThrough, is_ok = item.status == status::ok;
        if (was_committing) settled_.push_back({index_of(item.number), item.generation, item.status, 0});
        value.flags &= static_cast<u8>(~(kDirty | kCommitting));
        --dirty_count_;
        --lanes_[value.lane].dirty_count;
        update_held(item.number);
        ++(is_ok ? counters_.flushed : item.status == status::already_bound ? counters_.overruled : counters_.flush_failed);
        // The disk's value is the one that counts; and a writer who was told that it failed must not find it.
        if (item.status == status::already_bound || is_through || (!is_ok && was_committing)) leave(item.number);
    }
}

void KeyedStore::wake_flushers() {
    std::lock_guard lock(mutex_);
    is_waking_ = true;
    for (Lane& lane : lanes_) lane.has_dirty.notify_all();
}

// --- from the disk ---------------------------------------------------------------------------------------------------------------

void KeyedStore::reserve(std::span<DiskItem> items) {
    std::lock_guard lock(mutex_);
    for (DiskItem& item : items) {
        item.handle = kNoHandle;
        if (const u32 number = find(item.key); number != KeyedIndex<KeyOf>::kNone) {
            const bool is_resident = values_[number].state == State::resident;
            const u16 generation = executor_->generation(index_of(number));
            item.handle = handle_of(number);
            item.generation = is_resident ? generation : next_generation(generation);
            item.status = status::already_bound;  // a promotion of it is under way, or was
            continue;
        }
        if (is_fenced(item.key) || item.length == 0 || item.length > executor_->block_bytes()) {
            item.status = status::not_bound;
            continue;
        }
        Lane& lane = lanes_[lane_of(item.key)];
        std::optional<u64> block_offset;
        if (lane.reading_count >= std::max<u64>(lane_share(limit_), 1)) {
            item.status = status::no_space;
            continue;
        }
        if (used_ >= limit_ && !evict()) tick_locked();
        if (used_ < limit_ || evict()) block_offset = executor_->allocate();
        if (!block_offset) {
            item.status = status::no_space;
            continue;
        }
        const u32 number = take_number(item.key);
        Value& value = values_[number];
        value.block_offset = *block_offset;
        value.length = item.length;
        value.flags = kBusy;
        ++lane.reading_count;
        set_state(number, State::promoting);
        charge(item.key.tenant, value.length);
        item.number = number;
        item.handle = handle_of(number);
        item.generation = next_generation(executor_->generation(index_of(number)));
        item.address = reinterpret_cast<u64>(executor_->block(*block_offset));
        item.status = status::ok;
    }
}

void KeyedStore::promoted(std::span<DiskItem> items) {
    std::lock_guard lock(mutex_);
    for (DiskItem& item : items) {
        Value& value = values_[item.number];
        value.flags &= static_cast<u8>(~kBusy);
        --lanes_[value.lane].reading_count;
        if (value.state == State::promoting) {
            if (item.status == status::ok && item.length == value.length) {
                value.crc = item.crc;
                value.flags |= kRead;
                executor_->name(index_of(item.number), options_.owner, value.block_offset, value.length);
                set_state(item.number, State::resident);
                ++counters_.promoted;
            } else {
                ++counters_.promotion_failed;
                leave(item.number);
            }
        }
        settled_.push_back({index_of(item.number), item.generation, item.status, 1});
    }
}

u64 KeyedStore::list_read(u64 lane, u64 cursor, std::span<DiskItem> out, u64& count) const {
    std::lock_guard lock(mutex_);
    u64 at = cursor;
    for (count = 0; at < options_.capacity && count < out.size(); ++at) {
        const Value& value = values_[at];
        if (value.state != State::resident || !(value.flags & kRead) || value.lane != lane) continue;
        DiskItem& item = out[count++] = DiskItem{};
        item.key = value.key;
        item.number = static_cast<u32>(at);
        item.generation = executor_->generation(index_of(item.number));
    }
    return at < options_.capacity ? at : 0;
}

void KeyedStore::drop_read(std::span<const DiskItem> items) {
    std::lock_guard lock(mutex_);
    for (const DiskItem& item : items) {
        const Value& value = values_[item.number];
        if (value.state == State::resident && value.flags & kRead && executor_->generation(index_of(item.number)) == item.generation)
            leave(item.number);
    }
}

bool KeyedStore::will_have(u64 index, u16 generation) const {
    std::lock_guard lock(mutex_);
    const auto number = number_of(index);
    if (!number || values_[*number].state != State::promoting) return false;
    return generation == 0 || generation == next_generation(executor_->generation(index));
}

u64 KeyedStore::promoting_count() const {
    std::lock_guard lock(mutex_);
    return promoting_count_;
}

std::vector<Settled> KeyedStore::take_settled() {
    std::lock_guard lock(mutex_);
    return std::exchange(settled_, {});
}

// --- what is known of the whole -----------------------------------------------------------------------------------------------

KeyedCounters KeyedStore::counters() const {
    std::lock_guard lock(mutex_);
    return counters_;
}

KeyedLevels KeyedStore::levels() const {
    std::lock_guard lock(mutex_);
    return {used_, limit_, resident_count_, promoting_count_, leaving_.size(), dirty_count_, pinned_count_};
}

std::vector<std::pair<u64, u64>> KeyedStore::bytes_of_tenants() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::pair<u64, u64>> out;
    for (const auto& [tenant, usage] : tenants_) out.emplace_back(tenant, usage.bytes);
    return out;
}

u64 KeyedStore::bytes_of_tenant(u64 tenant) const {
    std::lock_guard lock(mutex_);
    return bytes_of(tenant);
}

u64 KeyedStore::memory_bytes() const {
    std::lock_guard lock(mutex_);
    return values_.capacity() * sizeof(Value) + index_.bytes() + free_.capacity() * sizeof(u32) + 3 * resident_.size() * sizeof(u64);
}

// The rules at the head of keyed_store.hpp, as code.
void KeyedStore::check_integrity() const {
    std::lock_guard lock(mutex_);
    const auto expect = [](bool holds, const char* what) {
        if (!holds) throw std::logic_error(std::string("keyed store: ") + what);
    };
    u64 resident = 0, promoting = 0, leaving = 0, dirty = 0, held = 0, pinned = 0;
    std::unordered_map<u64, u64> bytes;
    std::unordered_map<u64, u32> blocks;
    for (u32 number = 0; number < options_.capacity; ++number) {
        const Value& value = values_[number];
        const bool is_resident = value.state == State::resident, is_found = is_resident || value.state == State::promoting;
        const Entry entry = executor_->entry(index_of(number));
        expect(entry.is_valid() == is_resident, "an entry is valid exactly while its value is resident");
        expect(bit(resident_, number) == is_resident, "a mark of what is resident is wrong");
        expect(bit(held_, number) == (is_resident && (value.pins || value.flags & (kDirty | kBusy))), "a mark of what is held is wrong");
        if (value.state == State::free) continue;
        expect(blocks.emplace(value.block_offset, number).second, "two values share a block");
        expect((is_found && index_.find(value.key) == number) || value.state == State::leaving, "a value can't be found");
        if (is_resident) expect(entry.block_offset == value.block_offset && entry.length == value.length, "an entry names another block");
        if (is_found) bytes[value.key.tenant] += value.length;
        resident += is_resident;
        promoting += value.state == State::promoting;
        leaving += value.state == State::leaving;
        dirty += is_resident && value.flags & kDirty;
        held += bit(held_, number);
        pinned += value.pins > 0;
    }
    expect(resident + promoting + leaving == used_ && used_ <= limit_, "blocks are miscounted, or more than there may be");
    expect(free_.size() + used_ == options_.capacity, "a number is lost");
    expect(resident == resident_count_ && promoting == promoting_count_ && leaving == leaving_.size(), "states are miscounted");
    expect(index_.count() == resident + promoting, "the index has keys of no value");
    u64 in_lanes = 0;
    for (const Lane& lane : lanes_) in_lanes += lane.dirty_count;
    expect(in_lanes == dirty_count_, "what waits for each disk is miscounted");
    expect(dirty == dirty_count_ && held == held_count_ && pinned == pinned_count_, "holds are miscounted");
    for (const auto& [tenant, usage] : tenants_) expect(bytes[tenant] == usage.bytes, "a tenant's octets are miscounted");
    for (const auto& [tenant, count] : bytes) expect(count == bytes_of(tenant), "a tenant's octets are not counted");
}

}  // namespace kbtp

#include "executor.hpp"

#include <cstdlib>
#include <thread>

namespace kbtp {
namespace {

// Draft sections 3.2, 5.1, 5.2 and the tables of kbtp-completion.md.
constexpr u8 kVersion = 1;
constexpr u16 kInline = 0x0001, kSeal = 0x0002, kInvalidate = 0x0008, kAllowUnsealed = 0x0010;
constexpr u16 kValid = 0x0001, kSealed = 0x0002;
constexpr u64 kEmptySlot = ~u64{0};
// The octets of one block that are cleared here at most. Whoever calls serves other sessions, too, and they wait meanwhile.
constexpr u32 kClearMost = 256 * 1024;

// States of an entry and of a block (protocol/target.py EntryState, protocol/pool.py BlockState).
constexpr u8 kIdle = 0, kBound = 1, kReserved = 4, kKept = 5;
constexpr u8 kBlockFree = 0, kBlockTaken = 1, kBlockBound = 2, kBlockDraining = 3;

u16 known_flags(u8 op) {
    switch (op) {
        case opcode::load:
            return kInvalidate | kAllowUnsealed;
        case opcode::store:
        case opcode::alloc_store:
            return kInline | kSeal | kInvalidate;
        default:
            return 0;
    }
}

}  // namespace

u16 next_generation(u16 generation) { return generation == 0xffff ? 1 : static_cast<u16>(generation + 1); }

std::optional<Request> Request::parse(std::span<const u8> message) {
    const u8* m = message.data();
    if (message.size() < kHeader || m[0] != kVersion || m[1] < opcode::load || m[1] > opcode::free || load_be<u16>(m + 22) != 0) return {};
    Request r{};
    r.opcode = m[1];
    r.flags = load_be<u16>(m + 2);
    r.id = load_be<u64>(m + 4);
    r.handle = load_be<u64>(m + 12);
    r.generation = load_be<u16>(m + 20);
    if (r.flags & ~known_flags(r.opcode)) return {};
    if (r.opcode == opcode::free) return message.size() == kHeader ? std::optional(r) : std::nullopt;
    if (message.size() < kRequest) return {};
    r.stag = load_be<u32>(m + 24);
    r.offset = load_be<u64>(m + 28);
    r.length = load_be<u32>(m + 36);
    r.inlined = message.subspan(kRequest);
    if (!r.is_inline()) return r.inlined.empty() ? std::optional(r) : std::nullopt;
    if (r.invalidates() || r.stag != 0 || r.offset != 0 || r.inlined.size() != r.length) return {};
    return r;
}

Answer encode_answer(const Request& request, const Entry& entry, bool with_block) {
    Answer out{};
    out[0] = kVersion;
    out[1] = opcode::completion;
    store_be<u64>(&out[4], request.id);
    store_be<u64>(&out[12], request.handle);
    store_be<u16>(&out[20], entry.generation);
    if (with_block) {
        store_be<u32>(&out[24], entry.length);
        store_be<u64>(&out[32], entry.block_offset);
    }
    return out;
}

Executor::Executor(u8* table, u64 entries, u64 base_handle, u32 block_bytes, std::optional<PoolState> pool)
    : table_(table), entries_(entries), base_handle_(base_handle), block_bytes_(block_bytes), pool_(pool), readers_(entries) {}

u32 Executor::load_state(u64 index) const {
    return swap_to_host(__atomic_load_n(reinterpret_cast<const u32*>(table_ + 16 * index), __ATOMIC_SEQ_CST));
}

// Length and offset of a bound entry don't change before its Flags and Generation do, but for a STORE into an unsealed block, which
// changes the length: it is checked against the block's size before it is used.
Entry Executor::entry(u64 index) const {
    const u32 state = load_state(index);
    const u8* at = table_ + 16 * index;
    const u32 length = __atomic_load_n(reinterpret_cast<const u32*>(at + 4), __ATOMIC_ACQUIRE);
    const u64 block_offset = __atomic_load_n(reinterpret_cast<const u64*>(at + 8), __ATOMIC_RELAXED);
    return {static_cast<u16>(state >> 16), static_cast<u16>(state), swap_to_host(length), swap_to_host(block_offset)};
}

// After the data: another thread may read the length of an unsealed block at any time, and then reads the block.
void Executor::set_length(u64 index, u32 length) {
    __atomic_store_n(reinterpret_cast<u32*>(table_ + 16 * index + 4), swap_to_host(length), __ATOMIC_RELEASE);
}

void Executor::publish(u64 index, u16 flags, u16 generation) {
    pool_->generations[index] = generation;
    const u32 state = swap_to_host(u32{flags} << 16 | generation);
    __atomic_store_n(reinterpret_cast<u32*>(table_ + 16 * index), state, __ATOMIC_SEQ_CST);
}

bool Executor::begin_read(u64 index, const Entry& seen) {
    if (readers_[index].fetch_add(1) < kClaim && load_state(index) == (u32{seen.flags} << 16 | seen.generation)) {
        touch(index);
        return true;
    }
    end_read(index);
    return false;
}

// A claim lasts for one FREE, which waits for nothing.
void Executor::hold(u64 index) {
    while (readers_[index].fetch_add(1) >= kClaim) {
        end_read(index);
        std::this_thread::yield();
    }
    touch(index);
}

// --- the ring (draft sections 3.3 and 9.2; protocol/ring.py) -------------------------------------------------------------------

u64 Executor::advance(u64& counter) {
    const u64 old = counter;
    const u64 slots = u64{1} << pool_->log2_slots;
    const u64 ticket = old >> 32;
    const u64 next = (ticket + 1) & 0xffff'ffff;
    // What the masked FetchAdd leaves: the ticket, and in the low half the octet offset of its slot; unmasked, zero there.
    __atomic_store_n(&counter, next << 32 | (pool_->masked ? next % slots * 16 : 0), __ATOMIC_SEQ_CST);
    return ticket;
}

// The shared ring's Head is moved by this side alone, never by a peer, so a written slot stands for every ticket below Tail.
std::optional<u64> Executor::allocate() {
    std::lock_guard lock(ring_mutex_);
    const u64 head = pool_->counters[0] >> 32, tail = pool_->counters[1] >> 32;
    if (head == tail) return {};
    u32* slot = pool_->slots + 4 * (head & ((u64{1} << pool_->log2_slots) - 1));
    u8* offset = reinterpret_cast<u8*>(slot + 2);
    const u64 block_offset = load_be<u64>(offset);
    if (swap_to_host(slot[0]) != head || block_offset == kEmptySlot) return {};
    advance(pool_->counters[0]);
    store_be<u64>(offset, kEmptySlot);
    return block_offset;
}

// As many slots as blocks or more, and this block is in none: the slot for the next ticket was consumed.
void Executor::give_back(u64 block_offset) {
    std::lock_guard lock(ring_mutex_);
    const u64 ticket = advance(pool_->counters[1]);
    u32* slot = pool_->slots + 4 * (ticket & ((u64{1} << pool_->log2_slots) - 1));
    u8* offset = reinterpret_cast<u8*>(slot + 2);
    if (load_be<u64>(offset) != kEmptySlot) std::abort();  // a block is listed twice: nothing of this pool can be believed any more
    store_be<u64>(offset, block_offset);
    __atomic_store_n(slot, swap_to_host(static_cast<u32>(ticket)), __ATOMIC_RELEASE);
}

// --- blocks ---------------------------------------------------------------------------------------------------------------------

bool Executor::clears_at_length() const { return pool_->clears && block_bytes_ > kClearMost; }

bool Executor::is_idle(u64 index) const { return pool_->entry_states[index] == kIdle; }

std::optional<u64> Executor::take(const StoreGrant& grant, u64 index) {
    if (*grant.usage >= grant.quota) return {};
    const auto block_offset = allocate();
    if (!block_offset) return {};
    ++*grant.usage;
    block_state(*block_offset) = kBlockTaken;
    pool_->entry_states[index] = kReserved;
    return block_offset;
}

void Executor::untake(const StoreGrant& grant, u64 index, u64 block_offset, u32 written) {
    pool_->entry_states[index] = kIdle;
    return_block(grant, block_offset, written);
}

void Executor::return_block(const StoreGrant& grant, u64 block_offset, u32 written) {
    release(block_offset, written);
    --*grant.usage;
}

// At most the first `written` octets of the block may not be clear. What lies in the ring is, if the pool clears.
void Executor::release(u64 block_offset, u32 written) {
    if (pool_->clears) std::memset(block(block_offset), 0, written);
    block_state(block_offset) = kBlockFree;
    give_back(block_offset);
}

void Executor::bind(const StoreGrant& grant, u64 index, u64 block_offset, u32 length, bool seal) {
    bind(grant.owner, index, block_offset, length, seal);
}

// The entry becomes valid after the data is in the block, its length and its offset are in the entry (draft section 6.3).
void Executor::bind(u64 owner, u64 index, u64 block_offset, u32 length, bool seal) {
    set_length(index, length);
    __atomic_store_n(reinterpret_cast<u64*>(table_ + 16 * index + 8), swap_to_host(block_offset), __ATOMIC_RELAXED);
    pool_->entry_states[index] = kBound;
    pool_->owners[index] = owner;
    block_state(block_offset) = kBlockBound;
    publish(index, seal ? kValid | kSealed : kValid, next_generation(pool_->generations[index]));
}

void Executor::update(u64 index, u32 length, bool seal) {
    set_length(index, length);
    if (seal) publish(index, kValid | kSealed, pool_->generations[index]);
}

// False, with nothing changed, if the block is being read.
bool Executor::free(const StoreGrant& grant, u64 index) {
    if (!claim(index)) return false;
    free_claimed(grant, index);
    return true;
}

void Executor::free_claimed(const StoreGrant& grant, u64 index) {
    const u64 block_offset = load_be<u64>(table_ + 16 * index + 8);
    clear(index);
    return_block(grant, block_offset, block_bytes_);
    drop_claim(index);
}

// --- for the keyed store -------------------------------------------------------------------------------------------------------

void Executor::watch(u64 base, u64 count) {
    recent_ = std::vector<std::atomic<u64>>((count + 63) / 64);
    watched_base_ = base;
    watched_count_ = count;
}

void Executor::touch(u64 index) {
    const u64 number = index - watched_base_;
    if (number >= watched_count_) return;
    std::atomic<u64>& word = recent_[number / 64];
    const u64 bit = u64{1} << number % 64;
    // Most reads find the mark there, and then nothing is written that other threads have in their caches.
    if (!(word.load(std::memory_order_relaxed) & bit)) word.fetch_or(bit, std::memory_order_relaxed);
}

bool Executor::claim(u64 index) {
    u32 none = 0;
    return readers_[index].compare_exchange_strong(none, kClaim);
}

// The generation advances before anybody else can have the block, and before it is cleared under one who reads it by himself.
void Executor::clear(u64 index) {
    publish(index, 0, next_generation(pool_->generations[index]));
    std::atomic_thread_fence(std::memory_order_seq_cst);
    pool_->entry_states[index] = kIdle;
    pool_->owners[index] = 0;
}

void Executor::hand_over(const StoreGrant& grant, u64 index) {
    clear(index);
    --*grant.usage;
}

void Executor::name(u64 index, u64 owner, u64 block_offset, u32 length) { bind(owner, index, block_offset, length, true); }

void Executor::skip(u64 index) { publish(index, 0, next_generation(next_generation(pool_->generations[index]))); }

void Executor::let_idle(u64 index) { pool_->entry_states[index] = kIdle; }

void Executor::keep(u64 index, u64 block_offset, bool is_draining) {
    pool_->entry_states[index] = kKept;
    block_state(block_offset) = is_draining ? kBlockDraining : kBlockTaken;
}

}  // namespace kbtp

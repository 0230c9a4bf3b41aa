#include "requester.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "crc32c.hpp"

namespace kbtp {
namespace {

constexpr std::size_t kRequest = 40, kLookupHead = 40, kLookupItem = 16, kPublishHead = 40, kPublishItem = 32, kPublishResult = 12,
                      kId = 16, kGetHead = 48, kGetItem = 32;
constexpr u8 kLoad = 3, kAllocStore = 5, kCompletionOpcode = 8, kLookup = 0x80, kLookupResultOpcode = 0x81, kPublish = 0x82,
             kPublishResultOpcode = 0x83, kGet = 0x90;
constexpr u16 kInline = 0x0001, kSeal = 0x0002;
constexpr u64 kNoHandle = ~u64{0};

void encode_header(u8* out, u8 opcode, u16 flags, u64 request_id, u64 handle, u16 generation) {
    out[0] = 1;
    out[1] = opcode;
    store_be<u16>(out + 2, flags);
    store_be<u64>(out + 4, request_id);
    store_be<u64>(out + 12, handle);
    store_be<u16>(out + 20, generation);
    store_be<u16>(out + 22, 0);
}

// Memory for messages on their way. What was sent is kept for the next, so that a put costs no fresh pages.
class MessageMemory {
  public:
    std::shared_ptr<std::vector<u8>> take(std::size_t size) {
        std::unique_ptr<std::vector<u8>> memory;
        {
            std::lock_guard lock(mutex_);
            if (!free_.empty()) {
                memory = std::move(free_.back());
                free_.pop_back();
            }
        }
        if (!memory) memory = std::make_unique<std::vector<u8>>();
        memory->resize(size);
        return {memory.release(), [this](std::vector<u8>* used) { give_back(std::unique_ptr<std::vector<u8>>(used)); }};
    }

  private:
    static constexpr std::size_t kMost = 8, kLargest = 4 * 1024 * 1024;

    void give_back(std::unique_ptr<std::vector<u8>> used) {
        if (used->capacity() > kLargest) return;
        std::lock_guard lock(mutex_);
        if (free_.size() < kMost) free_.push_back(std::move(used));
    }

    std::mutex mutex_;
    std::vector<std::unique_ptr<std::vector<u8>>> free_;
};

// Never destroyed: batches may outlive whatever is destroyed at exit.
MessageMemory& message_memory() {
    static auto* memory = new MessageMemory;
    return *memory;
}

}  // namespace

Outgoing RequestBatch::take_next(u8* out) {
    Outgoing next = encode(next_, out);
    waiting_[next_++] = true;
    ++outstanding_;
    return next;
}

bool RequestBatch::settle(std::span<const u8> answer) {
    const u32 index = index_of(answer);
    if (index >= waiting_.size() || !waiting_[index]) return false;
    const auto status = abandoned_ ? std::optional<u16>(0) : keep(index, answer);
    if (!status) return false;
    waiting_[index] = false;
    --outstanding_;
    failed_ += *status != 0;
    return true;
}

void RequestBatch::abandon() {
    abandoned_ = true;
    limit_ = next_;
}

// --- LOADs ------------------------------------------------------------------------------------------------------------------------

LoadBatch::LoadBatch(u32 sequence, u32 stag, u16 flags, std::vector<LoadRequest> requests)
    : RequestBatch(sequence, requests.size()),
      stag_(stag),
      flags_(flags),
      requests_(std::move(requests)),
      results_(requests_.size(), LoadResult{kNoStatus, 0, 0, 0, 0, 0}) {}

// Draft sections 5.1 and 5.2: header and Data Descriptor of a LOAD. The Request ID is the batch's sequence and the place in it.
Outgoing LoadBatch::encode(std::size_t index, u8* out) {
    const LoadRequest& r = requests_[index];
    encode_header(out, kLoad, flags_, u64{sequence_} << 32 | index, r.handle, r.generation);
    store_be<u32>(out + 24, stag_);
    store_be<u64>(out + 28, r.offset);
    store_be<u32>(out + 36, r.length);
    return {.length = kRequest, .write = ExpectedWrite{sequence_, static_cast<u32>(index), stag_, r.offset, r.length}};
}

std::optional<u16> LoadBatch::keep(std::size_t index, std::span<const u8> a) {
    if (a[1] != kCompletionOpcode || is_message(a)) return {};
    if (load_be<u16>(&a[22]) == 0 && load_be<u32>(&a[24]) > requests_[index].length) return {};  // it would not have fitted
    results_[index] = {load_be<u16>(&a[22]), load_be<u16>(&a[20]), load_be<u32>(&a[24]), load_be<u64>(&a[32]), load_be<u32>(&a[28]), 0};
    return results_[index].status;
}

// --- encoded messages -----------------------------------------------------------------------------------------------------------

MessageBatch::MessageBatch(u32 sequence, std::shared_ptr<const std::vector<u8>> octets, std::vector<u32> lengths)
    : RequestBatch(sequence, lengths.size()), octets_(std::move(octets)), starts_(1), answers_(lengths.size()) {
    for (const u32 length : lengths) starts_.push_back(starts_.back() + length);
}

Outgoing MessageBatch::encode(std::size_t index, u8*) {
    return {.length = static_cast<u32>(starts_[index + 1] - starts_[index]), .octets = octets_, .at = starts_[index]};
}

std::optional<u16> MessageBatch::keep(std::size_t index, std::span<const u8> answer) {
    if (!is_message(answer)) return {};
    const bool is_completion = answer[1] == kCompletionOpcode;
    if (!is_completion && answer[1] != (*octets_)[starts_[index] + 1] + 1) return {};
    answers_[index].assign(answer.begin(), answer.end());
    return is_completion ? load_be<u16>(&answer[22]) : u16{0};
}

// --- puts -------------------------------------------------------------------------------------------------------------------------

std::shared_ptr<MessageBatch> make_puts(u32 sequence, const PutRequest& r) {
    const std::size_t count = r.handles.size(), publishes = (count + r.values_each - 1) / r.values_each;
    std::vector<u32> totals(count);
    std::size_t size = publishes * kPublishHead + count * (kRequest + kPublishItem);
    for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t p = 0; p < r.pieces; ++p) totals[i] += r.lengths[i * r.pieces + p];
        if (totals[i] <= r.inline_bytes)
            size += totals[i];
        else if (!r.stag)
            return nullptr;
    }
    auto octets = message_memory().take(size);
    std::vector<u32> lengths, crcs(count);
    lengths.reserve(count + publishes);
    u8* at = octets->data();
    for (std::size_t first = 0; first < count; first += r.values_each) {
        const std::size_t end = std::min(count, first + r.values_each);
        for (std::size_t i = first; i < end; ++i) {
            const bool is_inline = totals[i] <= r.inline_bytes;
            const u64 request_id = MessageBatch::request_id(sequence, lengths.size());
            encode_header(at, kAllocStore, is_inline ? kInline | kSeal : kSeal, request_id, r.handles[i], 0);
            store_be<u32>(at + 24, is_inline ? 0 : r.stag);
            store_be<u64>(at + 28, is_inline ? 0 : r.offsets[i]);
            store_be<u32>(at + 36, totals[i]);
            at += kRequest;
            u32 crc = 0;
            for (std::size_t p = i * r.pieces; p < (i + 1) * r.pieces; ++p) {
                const u8* piece = reinterpret_cast<const u8*>(r.addresses[p]);
                if (is_inline && r.lengths[p] > 0) {  // the copy stays in the cache: it is sent at once
                    std::memcpy(at, piece, r.lengths[p]);
                    piece = std::exchange(at, at + r.lengths[p]);
                }
                crc = crc32c_extend(crc, piece, r.lengths[p]);
            }
            crcs[i] = crc;
            lengths.push_back(static_cast<u32>(kRequest + (is_inline ? totals[i] : 0)));
        }
        encode_header(at, kPublish, 0, MessageBatch::request_id(sequence, lengths.size()), 0, 0);
        store_be<u64>(at + 24, r.tenant);
        store_be<u32>(at + 32, r.flags);
        store_be<u32>(at + 36, static_cast<u32>(end - first));
        at += kPublishHead;
        for (std::size_t i = first; i < end; ++i, at += kPublishItem) {
            std::copy_n(&r.ids[kId * i], kId, at);
            store_be<u64>(at + 16, r.handles[i]);
            store_be<u32>(at + 24, 0);  // any generation
            store_be<u32>(at + 28, crcs[i]);
        }
        lengths.push_back(static_cast<u32>(kPublishHead + kPublishItem * (end - first)));
    }
    return std::make_shared<MessageBatch>(sequence, std::move(octets), std::move(lengths));
}

std::vector<PutResult> put_results(const MessageBatch& batch, std::size_t count, u32 values_each) {
    std::vector<PutResult> results(count, PutResult{kNoHandle, RequestBatch::kNoStatus, RequestBatch::kNoStatus, 0, 0});
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t group = i / values_each, first = group * values_each, end = std::min<std::size_t>(count, first + values_each);
        const std::vector<u8>&stored = batch.answers()[i + group], &published = batch.answers()[end + group];
        PutResult& result = results[i];
        if (!stored.empty()) result.stored = load_be<u16>(&stored[22]);
        if (published.empty()) continue;
        const u8* at = published.data() + RequestBatch::kHeader + 4 + kPublishResult * (i - first);
        if (published[1] != kPublishResultOpcode) {
            result.status = load_be<u16>(&published[22]);
        } else if (at + kPublishResult <= published.data() + published.size()) {
            result.status = load_be<u16>(at);
            result.generation = load_be<u16>(at + 2);
            result.handle = load_be<u64>(at + 4);
        }
    }
    return results;
}

// --- lookups ----------------------------------------------------------------------------------------------------------------------

std::shared_ptr<MessageBatch> make_lookups(u32 sequence, u64 tenant, u32 flags, u32 values_each, std::span<const u8> ids) {
    const std::size_t count = ids.size() / kId, messages = (count + values_each - 1) / values_each;
    auto octets = message_memory().take(messages * kLookupHead + ids.size());
    std::vector<u32> lengths;
    lengths.reserve(messages);
    u8* at = octets->data();
    for (std::size_t first = 0; first < count; first += values_each) {
        const std::size_t some = std::min<std::size_t>(count - first, values_each);
        encode_header(at, kLookup, 0, MessageBatch::request_id(sequence, lengths.size()), 0, 0);
        store_be<u64>(at + 24, tenant);
        store_be<u32>(at + 32, flags);
        store_be<u32>(at + 36, static_cast<u32>(some));
        std::copy_n(&ids[kId * first], kId * some, at + kLookupHead);
        lengths.push_back(static_cast<u32>(kLookupHead + kId * some));
        at += lengths.back();
    }
    return std::make_shared<MessageBatch>(sequence, std::move(octets), std::move(lengths));
}

std::shared_ptr<MessageBatch> make_gets(u32 sequence, u64 tenant, u32 flags, u32 values_each, std::span<const u8> ids, u32 stag,
                                        std::span<const u64> offsets, std::span<const u32> rooms) {
    const std::size_t count = rooms.size(), messages = (count + values_each - 1) / values_each;
    auto octets = message_memory().take(messages * kGetHead + count * kGetItem);
    std::vector<u32> lengths;
    u8* at = octets->data();
    for (std::size_t first = 0; first < count; first += values_each) {
        const std::size_t some = std::min<std::size_t>(count - first, values_each);
        encode_header(at, kGet, 0, MessageBatch::request_id(sequence, lengths.size()), 0, 0);
        store_be<u64>(at + 24, tenant);
        store_be<u32>(at + 32, flags);
        store_be<u32>(at + 36, static_cast<u32>(some));
        store_be<u32>(at + 40, stag);
        store_be<u32>(at + 44, 0);
        lengths.push_back(static_cast<u32>(kGetHead + kGetItem * some));
        at += kGetHead;
        for (std::size_t i = first; i < first + some; ++i, at += kGetItem) {
            std::copy_n(&ids[kId * i], kId, at);
            store_be<u64>(at + 16, offsets[i]);
            store_be<u32>(at + 24, rooms[i]);
            store_be<u32>(at + 28, 0);
        }
    }
    return std::make_shared<MessageBatch>(sequence, std::move(octets), std::move(lengths));
}

std::vector<LookupResult> lookup_results(const MessageBatch& batch, std::size_t count, u32 values_each, bool is_prefix) {
    std::vector<LookupResult> results(count, LookupResult{kNoHandle, 0, 0, 0, 0});
    bool is_whole = true;
    for (std::size_t first = 0, message = 0; first < count && (is_whole || !is_prefix); first += values_each, ++message) {
        const std::vector<u8>& answer = batch.answers()[message];
        const std::size_t asked = std::min<std::size_t>(count - first, values_each);
        std::size_t found = 0;
        if (answer.size() >= RequestBatch::kHeader + 4 && (answer[1] == kLookupResultOpcode || answer[1] == kGet + 1))
            found = std::min<std::size_t>({load_be<u32>(&answer[24]), asked, (answer.size() - RequestBatch::kHeader - 4) / kLookupItem});
        is_whole = found == asked;
        const u8* at = answer.data() + RequestBatch::kHeader + 4;
        for (std::size_t i = first; i < first + found; ++i, at += kLookupItem) {
            results[i] = {load_be<u64>(at), load_be<u16>(at + 8), at[10], at[11], load_be<u32>(at + 12)};
            is_whole = is_whole && at[10] != 0;
        }
    }
    return results;
}

}  // namespace kbtp

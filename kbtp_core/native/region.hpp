// Registered memory: what an STag names, who may touch it, and how it is taken away again.
//
// Three rules carry the safety of the whole stack (RFC 5042 section 5; iwarp-reference section 5):
// 1. Memory is touched only between `pin` and the pin's end, and a pin is held across one non-blocking socket call, one copy, or the
// copies out of what one such call has read, never longer.
// 2. `invalidate` first turns new pins away, then waits for those that are held. When it has returned, not one octet changes or is read.
// 3. An STag is a random 32-bit number, works only inside its protection domain, and is not drawn again soon.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "types.hpp"

namespace kbtp {

// A gather list that grows on the heap only once.
using IoVectors = std::vector<iovec>;

class Region {
  public:
    // Pages of `page_bytes` each, one run of tagged offsets [0, pages.size() * page_bytes) cut to `length`.
    Region(u32 stag, u32 pd, u8 rights, std::vector<u8*> pages, u64 page_bytes, u64 length)
        : stag_(stag), pd_(pd), rights_(rights), page_bytes_(page_bytes), length_(length), pages_(std::move(pages)) {}

    u32 stag() const { return stag_; }
    u32 pd() const { return pd_; }
    u64 length() const { return length_; }
    bool has(u8 rights) const { return (rights_ & rights) == rights; }
    bool is_valid() const { return valid_.load(); }

    // Byte-exact, and no wrap: offset + size is never computed before it is known to fit.
    bool contains(u64 offset, u64 size) const { return offset <= length_ && size <= length_ - offset; }

    // Append the pieces of [offset, offset + size), which must be contained.
    void gather(u64 offset, u64 size, IoVectors& out) const;

    // Address of [offset, offset + size) if it lies in one page, else null.
    u8* contiguous(u64 offset, u64 size) const;

    bool pin() {
        users_.fetch_add(1);
        if (valid_.load()) return true;
        unpin();
        return false;
    }
    void unpin() {
        if (users_.fetch_sub(1) == 1 && !valid_.load()) users_.notify_all();
    }
    void invalidate() {
        valid_.store(false);
        for (u32 held = users_.load(); held != 0; held = users_.load()) users_.wait(held);
    }

  private:
    const u32 stag_, pd_;
    const u8 rights_;
    const u64 page_bytes_, length_;
    const std::vector<u8*> pages_;
    std::atomic<bool> valid_{true};
    std::atomic<u32> users_{0};
};

using RegionPtr = std::shared_ptr<Region>;

// Holds a region's memory in place for one copy or one socket call.
class Pin {
  public:
    Pin() = default;
    explicit Pin(RegionPtr region) : region_(region && region->pin() ? std::move(region) : nullptr) {}
    Pin(Pin&& other) noexcept : region_(std::move(other.region_)) {}
    Pin& operator=(Pin&&) = delete;
    ~Pin() {
        if (region_) region_->unpin();
    }
    explicit operator bool() const { return region_ != nullptr; }

  private:
    RegionPtr region_;
};

// The same for a caller that keeps the region alive itself; holds where there is no region, too.
class BorrowedPin {
  public:
    explicit BorrowedPin(Region* region) : region_(region), holds_(!region || region->pin()) {}
    BorrowedPin(const BorrowedPin&) = delete;
    BorrowedPin& operator=(const BorrowedPin&) = delete;
    ~BorrowedPin() {
        if (region_ && holds_) region_->unpin();
    }
    explicit operator bool() const { return holds_; }

  private:
    Region* const region_;
    const bool holds_;
};

// All regions of a device, by STag. Any thread.
class RegionTable {
  public:
    // `fixed_stags` are handed out first, for frames that tests know by heart.
    explicit RegionTable(std::deque<u32> fixed_stags) : fixed_(std::move(fixed_stags)) {}

    RegionPtr add(u32 pd, u8 rights, std::vector<u8*> pages, u64 page_bytes, u64 length);
    RegionPtr find(u32 stag) const;
    // Invalidate and forget: one region, or all of a protection domain.
    void remove(const RegionPtr& region);
    void remove_domain(u32 pd);

  private:
    u32 draw_stag();  // with mutex_ held

    mutable std::mutex mutex_;
    std::unordered_map<u32, RegionPtr> regions_;
    std::deque<u32> fixed_;
    std::deque<u32> retired_;  // the last STags given up, not drawn again yet
    std::unordered_set<u32> retired_set_;
    std::random_device entropy_;
};

}  // namespace kbtp

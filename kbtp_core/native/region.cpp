#include "region.hpp"

#include <algorithm>

namespace kbtp {
namespace {
constexpr std::size_t kRetiredStags = 65536;
}

void Region::gather(u64 offset, u64 size, IoVectors& out) const {
    while (size > 0) {
        const u64 page = offset / page_bytes_, within = offset % page_bytes_;
        const u64 piece = std::min(size, page_bytes_ - within);
        out.push_back({pages_[page] + within, static_cast<std::size_t>(piece)});
        offset += piece;
        size -= piece;
    }
}

u8* Region::contiguous(u64 offset, u64 size) const {
    const u64 within = offset % page_bytes_;
    return size <= page_bytes_ - within ? pages_[offset / page_bytes_] + within : nullptr;
}

RegionPtr RegionTable::add(u32 pd, u8 rights, std::vector<u8*> pages, u64 page_bytes, u64 length) {
    std::lock_guard lock(mutex_);
    const u32 stag = draw_stag();
    auto region = std::make_shared<Region>(stag, pd, rights, std::move(pages), page_bytes, length);
    regions_[stag] = region;
    return region;
}

u32 RegionTable::draw_stag() {
    if (!fixed_.empty()) {
        const u32 stag = fixed_.front();
        fixed_.pop_front();
        return stag;
    }
    // std::random_device reads the kernel's generator: nobody can guess the next one from those already seen.
    for (;;) {
        const u32 stag = entropy_();
        if (stag != 0 && !regions_.contains(stag) && !retired_set_.contains(stag)) return stag;
    }
}

RegionPtr RegionTable::find(u32 stag) const {
    std::lock_guard lock(mutex_);
    auto it = regions_.find(stag);
    return it == regions_.end() ? nullptr : it->second;
}

void RegionTable::remove(const RegionPtr& region) {
    {
        std::lock_guard lock(mutex_);
        auto it = regions_.find(region->stag());
        if (it != regions_.end() && it->second == region) {
            regions_.erase(it);
            retired_.push_back(region->stag());
            retired_set_.insert(region->stag());
            if (retired_.size() > kRetiredStags) {
                retired_set_.erase(retired_.front());
                retired_.pop_front();
            }
        }
    }
    region->invalidate();  // outside the lock: it waits for pins, and their holders may look regions up
}

void RegionTable::remove_domain(u32 pd) {
    std::vector<RegionPtr> mine;
    {
        std::lock_guard lock(mutex_);
        for (const auto& [stag, region] : regions_)
            if (region->pd() == pd) mine.push_back(region);
    }
    for (const auto& region : mine) remove(region);
}

}  // namespace kbtp

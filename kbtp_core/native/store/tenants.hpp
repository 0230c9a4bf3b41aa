// How many octets each tenant has committed on a node, over all its disks, and how many it may have.
#pragma once

#include <mutex>
#include <unordered_map>

#include "../bytes.hpp"

namespace kbtp::store {

// Any thread.
class TenantLedger {
  public:
    // Whether the tenant may have so many octets more; they are then counted.
    bool charge(u64 tenant, u64 bytes) {
        const std::lock_guard guard(mutex_);
        const auto limit = limits_.find(tenant);
        const u64 allowed = limit != limits_.end() ? limit->second : default_limit_;
        const auto known = used_.find(tenant);
        if (bytes > allowed || (known != used_.end() && known->second > allowed - bytes)) {
            ++refused_;  // and nothing is kept of a tenant that has nothing
            return false;
        }
        used_[tenant] += bytes;
        return true;
    }

    // Octets that are there already: counted whatever the limit is.
    void count(u64 tenant, u64 bytes) {
        const std::lock_guard guard(mutex_);
        used_[tenant] += bytes;
    }

    void release(u64 tenant, u64 bytes) {
        const std::lock_guard guard(mutex_);
        const auto used = used_.find(tenant);
        if (used == used_.end()) return;
        used->second -= bytes < used->second ? bytes : used->second;
        if (used->second == 0) used_.erase(used);
    }

    // Limits hold for what comes from now on; nothing is taken away from a tenant that is over its own.
    void set_limits(std::unordered_map<u64, u64> limits, u64 default_limit) {
        const std::lock_guard guard(mutex_);
        limits_ = std::move(limits);
        default_limit_ = default_limit;
    }

    std::unordered_map<u64, u64> usage() const {
        const std::lock_guard guard(mutex_);
        return used_;
    }

    u64 refused() const {
        const std::lock_guard guard(mutex_);
        return refused_;
    }

  private:
    mutable std::mutex mutex_;  // guards all below
    std::unordered_map<u64, u64> used_, limits_;
    u64 default_limit_ = ~u64{0};
    u64 refused_ = 0;
};

}  // namespace kbtp::store

// Looking for more before going to sleep: for a bounded time, and only while nobody else wants the core.
//
// The core is yielded at every look, so a peer or a client on it comes first. Who computes there keeps it for a whole time slice, though,
// which is some milliseconds, a hundred times what sleeping and waking would cost. One such yield tells: from then on a thread sleeps at
// once, and tries again after a while that doubles as long as the core is still wanted. One instance a thread.
#pragma once

#include <sched.h>

#include <algorithm>

#include "types.hpp"

namespace kbtp {

class Spin {
  public:
    explicit Spin(Clock::duration limit) : limit_(limit) {}

    // Something has come, or is expected from now on.
    void begin(TimePoint now) { until_ = now + limit_; }

    void end() { until_ = {}; }

    // Whether to look again. False: go to sleep.
    bool again(TimePoint now) {
        if (now >= until_ || now < contended_until_) return false;
        ::sched_yield();
        const TimePoint after = Clock::now();
        if (after - now < kSlice) {
            if (now - contended_until_ > pause_) pause_ = kFirstPause;
            return true;
        }
        contended_until_ = after + pause_;
        pause_ = std::min(2 * pause_, kLongestPause);
        return true;  // long enough for something to have come
    }

  private:
    static constexpr Clock::duration kSlice = std::chrono::microseconds(250);
    static constexpr Clock::duration kFirstPause = std::chrono::milliseconds(50), kLongestPause = std::chrono::milliseconds(1600);

    const Clock::duration limit_;
    TimePoint until_{}, contended_until_{};
    Clock::duration pause_ = kFirstPause;
};

}  // namespace kbtp

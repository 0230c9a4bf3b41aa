// Looking for more before going to sleep: for a bounded time, and only where that pays.
//
// It pays when what is waited for comes within that time, and while nobody else wants the core. The core is yielded at every look, so a
// peer or a client on it comes first; but who computes there keeps it for a whole time slice, which is some milliseconds, a hundred times
// what sleeping and waking would cost. And where the other side has to wait for a core, a thread that sleeps makes room for it, and one
// that looks doesn't. So one long yield, or a few looks in vain, and a thread sleeps at once from then on; it tries again after a while,
// which doubles as long as that is in vain, too. One instance a thread.
#pragma once

#include <sched.h>

#include <algorithm>
#include <utility>

#include "types.hpp"

namespace kbtp {

class Spin {
  public:
    explicit Spin(Clock::duration limit) : limit_(limit) {}

    // Something is expected from now on.
    void begin(TimePoint now) {
        until_ = now + limit_;
        is_counted_ = false;
    }
    // Something has come, and more may.
    void hit(TimePoint now) {
        if (!is_counted_ && now < until_ && now >= paused_until_) {
            failures_ = 0;
            pause_ = kFirstPause;
        }
        begin(now);
    }
    void end() { until_ = {}; }

    // Whether to look again. False: go to sleep.
    bool again(TimePoint now) {
        if (now < paused_until_) return false;
        if (now >= until_) {
            if (!std::exchange(is_counted_, true) && ++failures_ >= kFailures) pause(now);
            return false;
        }
        ::sched_yield();
        if (const TimePoint after = Clock::now(); after - now > kSlice) pause(after);
        return true;
    }

  private:
    static constexpr Clock::duration kSlice = std::chrono::microseconds(250);
    static constexpr Clock::duration kFirstPause = std::chrono::milliseconds(20), kLongestPause = std::chrono::milliseconds(1280);
    static constexpr int kFailures = 3;

    void pause(TimePoint now) {
        paused_until_ = now + pause_;
        pause_ = std::min(2 * pause_, kLongestPause);
        failures_ = 0;
    }

    const Clock::duration limit_;
    TimePoint until_{}, paused_until_{};
    Clock::duration pause_ = kFirstPause;
    int failures_ = 0;
    bool is_counted_ = true;  // that this time was in vain
};

}  // namespace kbtp

// A completion queue: filled by the progress thread (and, for sends that finish at once, by the thread that posted), emptied by anybody.
//
// It never overflows: every entry belongs to a posted request or to one of the two events of a queue pair, and those are bounded.
// A waiting thread makes the progress of the queue's own queue pair, if it has just one that can be driven, and so sees what it waits for
// without a thread change. Otherwise it sleeps on a condition variable. The eventfd is for those who wait for several things at once:
// while somebody does, and for ever once `fd` was called, it is written on every change from empty to filled.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "types.hpp"

namespace kbtp {

// What a thread that waits for completions can do itself instead of sleeping.
class Drivable {
  public:
    virtual ~Drivable() = default;
    // Any thread: make progress until the completion queue has news or `until` has passed; at once if that can't be done here and now.
    virtual void drive(TimePoint until) = 0;
};

class CompletionQueue {
  public:
    CompletionQueue();
    ~CompletionQueue();
    CompletionQueue(const CompletionQueue&) = delete;
    CompletionQueue& operator=(const CompletionQueue&) = delete;

    void push(std::span<const Completion> batch);
    std::vector<Completion> poll(std::size_t limit);
    // Take the `loads` completions at the front that went well: their sequence numbers. Nothing else is taken.
    std::vector<u64> poll_loads();
    // Take the one of `sequence`, if it is the next.
    bool take_load(u32 sequence);
    bool is_empty();
    bool wait(double timeout_s);
    void wake();
    // Whoever waits has been woken, and knows.
    void forget_wake();
    int fd();

    // One more queue pair reports here.
    void attach(std::weak_ptr<Drivable> pair);
    // Whether `wait` would return now.
    bool has_news();
    // The eventfd to sleep on, readable once there is news; -1 if there is some already. `end_sleep` follows unless it was -1.
    int begin_sleep();
    void end_sleep();

  private:
    std::shared_ptr<Drivable> sole_pair();
    void signal();  // with mutex_ held
    void quiet();   // with mutex_ held

    std::mutex mutex_;  // guards all below
    std::deque<Completion> queue_;
    std::condition_variable filled_;
    bool signaled_ = false, woken_ = false, fd_wanted_ = false;
    unsigned sleeping_ = 0, attached_ = 0;
    std::weak_ptr<Drivable> pair_;  // the only one
    const int event_fd_;
};

}  // namespace kbtp

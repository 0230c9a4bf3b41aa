// A completion queue: filled by the progress thread (and, for sends that finish at once, by the thread that posted), emptied by anybody.
//
// It never overflows: every entry belongs to a posted request or to one of the two events of a queue pair, and those are bounded.
// A waiting thread is woken by a condition variable. The eventfd is for those who wait for several things at once: once `fd` was called
// it is written on every change from empty to filled.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <span>

#include "types.hpp"

namespace kbtp {

class CompletionQueue {
  public:
    CompletionQueue();
    ~CompletionQueue();
    CompletionQueue(const CompletionQueue&) = delete;
    CompletionQueue& operator=(const CompletionQueue&) = delete;

    void push(std::span<const Completion> batch);
    std::size_t poll(std::span<Completion> out);
    bool wait(double timeout_s);
    void wake();
    int fd();

  private:
    void signal();  // with mutex_ held
    void quiet();   // with mutex_ held

    std::mutex mutex_;  // guards all below
    std::deque<Completion> queue_;
    std::condition_variable filled_;
    bool signaled_ = false, woken_ = false, fd_wanted_ = false;
    const int event_fd_;
};

}  // namespace kbtp

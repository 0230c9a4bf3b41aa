// A mutex whose most eager user can let others go first. std::mutex gives no turns: a thread that unlocks it only to lock it again at once
// may keep all others out for as long as it likes.
#pragma once

#include <atomic>
#include <mutex>

namespace kbtp {

class PoliteMutex {
  public:
    void lock() {
        waiting_.fetch_add(1);
        mutex_.lock();
        if (waiting_.fetch_sub(1) == 1) waiting_.notify_all();
    }
    // Once nobody waits for it any more.
    void lock_last() {
        for (unsigned count = waiting_.load(); count != 0; count = waiting_.load()) waiting_.wait(count);
        mutex_.lock();
    }
    bool try_lock() { return mutex_.try_lock(); }
    void unlock() { mutex_.unlock(); }

  private:
    std::mutex mutex_;
    std::atomic<unsigned> waiting_{0};  // threads in `lock`
};

}  // namespace kbtp

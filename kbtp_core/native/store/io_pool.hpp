// The threads that wait for a disk, so that nobody else has to.
//
// `run` gives them a batch and waits until it is done, or until the disk made no progress for `timeout`: then the disk hangs, and the batch
// is abandoned. Its threads may stay in the kernel for ever, so three rules:
// 1. What an abandoned batch still uses is owned by the batch: its function holds files and results by shared pointers.
// 2. The caller's memory is touched between `touch` and `let_go` alone, and `run` returns only when nobody is in between. Writes straight
//    from it are not begun once the batch is `given_up`; one that the kernel has begun may still read it, for a slot without a record.
// 3. Threads that do not come back are left behind when the pool ends; they own what they still look at.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "../bytes.hpp"

namespace kbtp::store {

// Page-aligned memory of one thread; grows to what was asked for.
class Bounce {
  public:
    Bounce() = default;
    ~Bounce();
    Bounce(const Bounce&) = delete;
    Bounce& operator=(const Bounce&) = delete;
    u8* room(std::size_t size);

  private:
    u8* data_ = nullptr;
    std::size_t size_ = 0;
};

class IoBatch;
using IoWork = std::function<void(u32 index, IoBatch& batch, Bounce& bounce)>;

class IoPool {
  public:
    IoPool(u32 threads, std::chrono::milliseconds timeout);
    ~IoPool();
    IoPool(const IoPool&) = delete;
    IoPool& operator=(const IoPool&) = delete;

    // work(0 … count-1), side by side. False if the disk hangs; what has not begun then never begins. Any thread but the pool's own.
    bool run(u32 count, IoWork work);

  private:
    struct Shared;
    static void serve(std::shared_ptr<Shared> shared);

    std::chrono::milliseconds timeout_;
    std::shared_ptr<Shared> shared_;
    std::vector<std::thread> threads_;
};

class IoBatch {
  public:
    IoBatch(u32 count, IoWork work) : count_(count), work_(std::move(work)) {}

    // Whether the caller's memory may be touched now.
    bool touch();
    void let_go();
    const std::atomic<bool>& given_up() const { return is_abandoned_; }

  private:
    friend class IoPool;
    const u32 count_;
    const IoWork work_;
    std::atomic<u32> touching_{0};
    std::atomic<bool> is_abandoned_{false};
    u32 begun_ = 0, done_ = 0;  // under the pool's mutex
};

}  // namespace kbtp::store

#include "io_pool.hpp"

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>

namespace kbtp::store {

Bounce::~Bounce() { std::free(data_); }

u8* Bounce::room(std::size_t size) {
    if (size <= size_) return data_;
    constexpr std::size_t kAlignment = 4096;
    const std::size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    u8* larger = static_cast<u8*>(std::aligned_alloc(kAlignment, rounded));
    if (!larger) throw std::bad_alloc();
    std::free(data_);
    data_ = larger;
    size_ = rounded;
    return data_;
}

bool IoBatch::touch() {
    touching_.fetch_add(1);  // before the flag is read; `run` sets the flag before it reads the count
    if (!is_abandoned_.load()) return true;
    touching_.fetch_sub(1);
    return false;
}

void IoBatch::let_go() { touching_.fetch_sub(1); }

struct IoPool::Shared {
    std::mutex mutex;  // guards all below
    std::condition_variable work_came, work_done;
    std::deque<std::shared_ptr<IoBatch>> batches;  // those with items that nobody has begun
    u64 done = 0;                                  // items, of all batches: the disk's progress
    u32 serving = 0;                               // threads that have not ended
    bool is_ending = false;
};

IoPool::IoPool(u32 threads, std::chrono::milliseconds timeout) : timeout_(timeout), shared_(std::make_shared<Shared>()) {
    shared_->serving = threads;
    for (u32 i = 0; i < threads; ++i) threads_.emplace_back(&IoPool::serve, shared_);
}

IoPool::~IoPool() {
    bool all_ended = false;
    {
        std::unique_lock lock(shared_->mutex);
        shared_->is_ending = true;
        shared_->work_came.notify_all();
        all_ended = shared_->work_done.wait_for(lock, timeout_, [&] { return shared_->serving == 0; });
    }
    for (std::thread& thread : threads_) all_ended ? thread.join() : thread.detach();
}

bool IoPool::run(u32 count, IoWork work) {
    if (count == 0) return true;
    const auto batch = std::make_shared<IoBatch>(count, std::move(work));
    std::unique_lock lock(shared_->mutex);
    shared_->batches.push_back(batch);
    count == 1 ? shared_->work_came.notify_one() : shared_->work_came.notify_all();
    while (batch->done_ < count) {
        const u64 disk = shared_->done;
        const u32 own = batch->done_;
        if (shared_->work_done.wait_for(lock, timeout_, [&] { return batch->done_ == count; })) return true;
        const bool moved = batch->begun_ == count ? batch->done_ > own : shared_->done > disk;
        if (moved) continue;
        std::erase(shared_->batches, batch);
        batch->is_abandoned_.store(true);
        lock.unlock();
        while (batch->touching_.load() != 0) std::this_thread::yield();  // a copy in memory is under way
        return false;
    }
    return true;
}

void IoPool::serve(std::shared_ptr<Shared> shared) {
    Bounce bounce;
    std::unique_lock lock(shared->mutex);
    for (;;) {
        shared->work_came.wait(lock, [&] { return shared->is_ending || !shared->batches.empty(); });
        if (shared->batches.empty()) break;
        const std::shared_ptr<IoBatch> batch = shared->batches.front();
        const u32 index = batch->begun_++;
        if (batch->begun_ == batch->count_) shared->batches.pop_front();
        lock.unlock();
        batch->work_(index, *batch, bounce);
        lock.lock();
        ++shared->done;
        if (++batch->done_ == batch->count_) shared->work_done.notify_all();
    }
    if (--shared->serving == 0) shared->work_done.notify_all();
}

}  // namespace kbtp::store

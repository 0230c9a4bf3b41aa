#include "completion_queue.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace kbtp {

CompletionQueue::CompletionQueue() : event_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd for a completion queue");
}

CompletionQueue::~CompletionQueue() { ::close(event_fd_); }

void CompletionQueue::signal() {
    filled_.notify_all();
    if (signaled_ || (!fd_wanted_ && sleeping_ == 0)) return;
    signaled_ = true;
    const u64 one = 1;
    [[maybe_unused]] auto n = ::write(event_fd_, &one, sizeof one);  // fails only when the counter is full, which is signaled too
}

void CompletionQueue::quiet() {
    if (!signaled_ || woken_) return;
    signaled_ = false;
    u64 count;
    [[maybe_unused]] auto n = ::read(event_fd_, &count, sizeof count);
}

void CompletionQueue::push(std::span<const Completion> batch) {
    if (batch.empty()) return;
    std::lock_guard lock(mutex_);
    queue_.insert(queue_.end(), batch.begin(), batch.end());
    signal();
}

std::vector<Completion> CompletionQueue::poll(std::size_t limit) {
    std::lock_guard lock(mutex_);
    const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(std::min(limit, queue_.size()));
    std::vector<Completion> out(queue_.begin(), end);
    queue_.erase(queue_.begin(), end);
    if (queue_.empty()) quiet();
    return out;
}

std::vector<u64> CompletionQueue::poll_loads() {
    std::vector<u64> sequences;
    std::lock_guard lock(mutex_);
    for (; !queue_.empty() && queue_.front().op == Op::loads && queue_.front().status == Status::ok; queue_.pop_front())
        sequences.push_back(queue_.front().wr_id);
    if (queue_.empty()) quiet();
    return sequences;
}

bool CompletionQueue::take_load(u32 sequence) {
    std::lock_guard lock(mutex_);
    if (queue_.empty() || queue_.front().op != Op::loads || queue_.front().status != Status::ok || queue_.front().wr_id != sequence)
        return false;
    queue_.pop_front();
    if (queue_.empty()) quiet();
    return true;
}

bool CompletionQueue::is_empty() {
    std::lock_guard lock(mutex_);
    return queue_.empty();
}

bool CompletionQueue::wait(double timeout_s) {
    const auto timeout = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e6)));
    const TimePoint until = Clock::now() + timeout;
    if (const auto pair = sole_pair()) pair->drive(until);
    std::unique_lock lock(mutex_);
    if (queue_.empty() && !woken_ && Clock::now() < until) filled_.wait_until(lock, until, [this] { return !queue_.empty() || woken_; });
    if (!queue_.empty()) return true;
    woken_ = false;
    quiet();
    return false;
}

void CompletionQueue::forget_wake() {
    std::lock_guard lock(mutex_);
    woken_ = false;
    if (queue_.empty()) quiet();
}

int CompletionQueue::fd() {
    std::lock_guard lock(mutex_);
    fd_wanted_ = true;
    if (!queue_.empty()) signal();
    return event_fd_;
}

void CompletionQueue::attach(std::weak_ptr<Drivable> pair) {
    std::lock_guard lock(mutex_);
    pair_ = ++attached_ == 1 ? std::move(pair) : std::weak_ptr<Drivable>();
}

std::shared_ptr<Drivable> CompletionQueue::sole_pair() {
    std::lock_guard lock(mutex_);
    return queue_.empty() && !woken_ ? pair_.lock() : nullptr;
}

bool CompletionQueue::has_news() {
    std::lock_guard lock(mutex_);
    return !queue_.empty() || woken_;
}

int CompletionQueue::begin_sleep() {
    std::lock_guard lock(mutex_);
    if (!queue_.empty() || woken_) return -1;
    ++sleeping_;
    return event_fd_;
}

void CompletionQueue::end_sleep() {
    std::lock_guard lock(mutex_);
    --sleeping_;
}

void CompletionQueue::wake() {
    std::lock_guard lock(mutex_);
    woken_ = true;
    signal();
}

}  // namespace kbtp

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
    if (signaled_ || !fd_wanted_) return;
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

std::size_t CompletionQueue::poll(std::span<Completion> out) {
    std::lock_guard lock(mutex_);
    const std::size_t n = std::min(out.size(), queue_.size());
    std::copy_n(queue_.begin(), n, out.begin());
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(n));
    if (queue_.empty()) quiet();
    return n;
}

bool CompletionQueue::wait(double timeout_s) {
    const auto timeout = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e6)));
    std::unique_lock lock(mutex_);
    filled_.wait_for(lock, timeout, [this] { return !queue_.empty() || woken_; });
    if (!queue_.empty()) return true;
    woken_ = false;
    quiet();
    return false;
}

int CompletionQueue::fd() {
    std::lock_guard lock(mutex_);
    fd_wanted_ = true;
    if (!queue_.empty()) signal();
    return event_fd_;
}

void CompletionQueue::wake() {
    std::lock_guard lock(mutex_);
    woken_ = true;
    signal();
}

}  // namespace kbtp

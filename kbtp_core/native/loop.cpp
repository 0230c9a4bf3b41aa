#include "loop.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

namespace kbtp {
namespace {

constexpr int kEvents = 64;

thread_local const Loop* running = nullptr;  // the loop whose thread this is

}  // namespace

Loop::Loop(Clock::duration spin)
    : spins_(spin > Clock::duration::zero()),
      spin_(spin),
      epoll_fd_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (epoll_fd_ < 0 || wake_fd_ < 0) {
        const int error = errno;
        if (epoll_fd_ >= 0) ::close(epoll_fd_);
        if (wake_fd_ >= 0) ::close(wake_fd_);
        throw std::system_error(error, std::generic_category(), "descriptors for a progress thread");
    }
    watch(wake_fd_, nullptr, EPOLLIN);
}

Loop::~Loop() {
    stop();
    join();
    ::close(wake_fd_);
    ::close(epoll_fd_);
}

void Loop::start() {
    thread_ = std::thread([this] { run(); });
}

void Loop::stop() {
    std::lock_guard lock(tasks_mutex_);
    if (std::exchange(stopped_, true)) return;
    tasks_.push_back([this] { stopping_ = true; });
    wake();
}

void Loop::join() {
    if (thread_.joinable()) thread_.join();
}

void Loop::forget_all() {
    std::vector<std::shared_ptr<Pollable>> dead;
    {
        std::lock_guard lock(graveyard_mutex_);
        is_over_ = true;
        dead.swap(graveyard_);
    }
    timed_.clear();
}

bool Loop::submit(std::function<void()> task) {
    std::lock_guard lock(tasks_mutex_);
    if (stopped_) return false;
    tasks_.push_back(std::move(task));
    wake();
    return true;
}

void Loop::wake() {
    const u64 one = 1;
    [[maybe_unused]] auto n = ::write(wake_fd_, &one, sizeof one);  // fails only when the counter is full, which wakes too
}

void Loop::run() {
    running = this;
    std::array<epoll_event, kEvents> events;
    while (!stopping_) {
        const int n = wait_for_events(events);
        for (int i = 0; i < n; ++i) {
            if (auto* who = static_cast<Pollable*>(events[static_cast<std::size_t>(i)].data.ptr))
                who->on_event(events[static_cast<std::size_t>(i)].events);
            else
                run_tasks();
        }
        bury();
    }
}

// What comes soon after an event, as the next request of a peer does, is seen without going to sleep in between. The core goes to whoever
// wants it meanwhile.
int Loop::wait_for_events(std::span<epoll_event> events) {
    const auto wait = [&](int timeout_ms) { return ::epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), timeout_ms); };
    const int timeout_ms = run_deadlines();
    int n = 0;
    if (spins_ && timeout_ms != 0)
        while ((n = wait(0)) == 0 && spin_.again(Clock::now())) continue;
    if (n == 0) n = wait(timeout_ms);
    if (n > 0 && spins_) spin_.hit(Clock::now());
    return n;
}

void Loop::run_tasks() {
    u64 count;
    [[maybe_unused]] auto n = ::read(wake_fd_, &count, sizeof count);
    std::vector<std::function<void()>> tasks;
    {
        std::lock_guard lock(tasks_mutex_);
        tasks.swap(tasks_);
    }
    for (auto& task : tasks) task();
}

// What is dead goes outside the lock: the end of the last owner of something may end more.
void Loop::bury() {
    std::vector<std::shared_ptr<Pollable>> dead;
    std::lock_guard lock(graveyard_mutex_);
    dead.swap(graveyard_);
}

int Loop::run_deadlines() {
    auto next = TimePoint::max();
    const auto now = Clock::now();
    for (std::size_t i = 0; i < timed_.size();) {
        auto who = timed_[i].lock();
        TimePoint due = who ? who->deadline.load() : TimePoint::max();
        if (due <= now) {
            if (who->deadline.compare_exchange_strong(due, TimePoint::max())) who->on_deadline();
            continue;  // it may have set another one, or may be gone
        }
        if (due == TimePoint::max()) {
            timed_[i] = std::move(timed_.back());
            timed_.pop_back();
            continue;
        }
        next = std::min(next, due);
        ++i;
    }
    if (next == TimePoint::max()) return -1;
    return static_cast<int>(std::clamp<long>(std::chrono::ceil<std::chrono::milliseconds>(next - now).count(), 0, 60'000));
}

void Loop::time(std::shared_ptr<Pollable> who) {
    if (running != this) {
        submit([this, who = std::move(who)] { time(who); });
        return;
    }
    for (const auto& known : timed_)
        if (known.lock() == who) return;
    timed_.push_back(who);
}

void Loop::keep_until_idle(std::shared_ptr<Pollable> who) {
    std::lock_guard lock(graveyard_mutex_);
    if (!is_over_) graveyard_.push_back(std::move(who));
}

void Loop::watch(int fd, Pollable* who, u32 events) {
    epoll_event e{.events = events, .data = {.ptr = who}};
    ::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &e);
}

void Loop::rearm(int fd, Pollable* who, u32 events) {
    epoll_event e{.events = events, .data = {.ptr = who}};
    ::epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd, &e);
}

void Loop::unwatch(int fd) { ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr); }

}  // namespace kbtp

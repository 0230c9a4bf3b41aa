#include "device.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace kbtp {
namespace {

constexpr int kEvents = 64;
// A peer whose host vanished without a FIN: give up when it has acknowledged nothing for this long.
constexpr unsigned kDeadPeerMs = 30'000;

thread_local const Device* progressing = nullptr;  // the device whose progress thread this is

int checked(int fd, const char* what) {
    if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
    return fd;
}

}  // namespace

Device::Device(DeviceOptions options)
    : options_(std::move(options)),
      capture_(options_.capture ? std::make_shared<Capture>(*options_.capture) : nullptr),
      regions_(options_.fixed_stags),
      epoll_fd_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_fd_(checked(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "eventfd")) {
    watch(wake_fd_, nullptr, EPOLLIN);
}

Device::~Device() {
    close();
    ::close(wake_fd_);
    ::close(epoll_fd_);
}

void Device::start() {
    thread_ = std::thread([this] { run(); });
}

// Not from the progress thread: it joins it.
void Device::close() {
    {
        std::lock_guard lock(tasks_mutex_);
        if (closed_) return;
        tasks_.push_back([this] { stopping_ = true; });
        closed_ = true;
        const u64 one = 1;
        [[maybe_unused]] auto n = ::write(wake_fd_, &one, sizeof one);
    }
    if (thread_.joinable()) thread_.join();
}

bool Device::submit(std::function<void()> task) {
    std::lock_guard lock(tasks_mutex_);
    if (closed_) return false;
    tasks_.push_back(std::move(task));
    const u64 one = 1;
    [[maybe_unused]] auto n = ::write(wake_fd_, &one, sizeof one);
    return true;
}

void Device::run() {
    progressing = this;
    std::array<epoll_event, kEvents> events;
    TimePoint spin_until{};
    while (!stopping_) {
        const int n = wait_for_events(events, spin_until);
        for (int i = 0; i < n; ++i) {
            if (auto* who = static_cast<Pollable*>(events[static_cast<std::size_t>(i)].data.ptr))
                who->on_event(events[static_cast<std::size_t>(i)].events);
            else
                run_tasks();
        }
        bury();
    }
    // Whatever still lives ends here, on the thread that owns it.
    std::vector<std::shared_ptr<QueuePair>> pairs;
    {
        std::lock_guard lock(pairs_mutex_);
        for (auto& [number, pair] : pairs_) pairs.push_back(pair);
    }
    for (auto& pair : pairs) pair->end_now();
    listeners_.clear();
    {
        std::lock_guard lock(pairs_mutex_);
        finished_ = true;
    }
    bury();
    timed_.clear();
}

// What comes soon after an event, as the next request of a peer does, is seen without going to sleep in between. The core goes to whoever
// wants it meanwhile.
int Device::wait_for_events(std::span<epoll_event> events, TimePoint& spin_until) {
    const auto wait = [&](int timeout_ms) { return ::epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), timeout_ms); };
    const int timeout_ms = run_deadlines();
    int n = 0;
    if (options_.spin > Clock::duration::zero() && timeout_ms != 0)
        while ((n = wait(0)) == 0 && Clock::now() < spin_until) ::sched_yield();
    if (n == 0) n = wait(timeout_ms);
    if (n > 0) spin_until = Clock::now() + options_.spin;
    return n;
}

void Device::bury() {
    std::vector<std::shared_ptr<Pollable>> dead;
    std::lock_guard lock(pairs_mutex_);
    dead.swap(graveyard_);
}

void Device::run_tasks() {
    u64 count;
    [[maybe_unused]] auto n = ::read(wake_fd_, &count, sizeof count);
    std::vector<std::function<void()>> tasks;
    {
        std::lock_guard lock(tasks_mutex_);
        tasks.swap(tasks_);
    }
    for (auto& task : tasks) task();
}

int Device::run_deadlines() {
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

void Device::time(std::shared_ptr<Pollable> who) {
    if (progressing != this) {
        submit([this, who = std::move(who)] { time(who); });
        return;
    }
    for (const auto& known : timed_)
        if (known.lock() == who) return;
    timed_.push_back(who);
}

void Device::watch(int fd, Pollable* who, u32 events) {
    epoll_event e{.events = events, .data = {.ptr = who}};
    ::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &e);
}

void Device::rearm(int fd, Pollable* who, u32 events) {
    epoll_event e{.events = events, .data = {.ptr = who}};
    ::epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd, &e);
}

void Device::unwatch(int fd) { ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr); }

std::shared_ptr<QueuePair> Device::create_qp(u32 pd, std::shared_ptr<CompletionQueue> cq, QueueLimits limits) {
    auto pair = std::make_shared<QueuePair>(shared_from_this(), next_qp_.fetch_add(1), pd, cq, limits);
    cq->attach(pair);
    std::lock_guard lock(pairs_mutex_);
    pairs_[pair->number()] = pair;
    return pair;
}

void Device::forget(QueuePair& qp) {
    const QueuePairStats last = qp.stats();
    std::lock_guard lock(pairs_mutex_);
    const auto it = pairs_.find(qp.number());
    if (it == pairs_.end()) return;
    if (!finished_) graveyard_.push_back(it->second);
    pairs_.erase(it);
    ended_.add(last);
    ++ended_.queue_pairs_ended;
}

// A pair that ends meanwhile is counted once: with those that were alive.
DeviceStats Device::stats() {
    std::vector<std::shared_ptr<QueuePair>> alive;
    DeviceStats stats;
    {
        std::lock_guard lock(pairs_mutex_);
        for (const auto& [number, pair] : pairs_) alive.push_back(pair);
        stats = ended_;
    }
    for (const auto& pair : alive) stats.add(pair->stats());
    stats.queue_pairs = alive.size();
    if (capture_) stats.capture = capture_->stats();
    return stats;
}

std::unique_ptr<CaptureStream> Device::capture(int fd, bool is_active) const {
    return capture_ ? capture_->open_stream(fd, is_active) : nullptr;
}

void Device::keep_until_idle(std::shared_ptr<Pollable> who) {
    std::lock_guard lock(pairs_mutex_);
    if (!finished_) graveyard_.push_back(std::move(who));
}

void Device::forget(const Listener& listener) {
    std::erase_if(listeners_, [&](const auto& known) { return known.get() == &listener; });
}

// Small messages must not wait for each other; a vanished peer must not hold a socket for ever.
void Device::configure_socket(int fd, bool is_local_peer) const {
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kDeadPeerMs, sizeof kDeadPeerMs);
    // Best effort: an algorithm that the kernel does not allow leaves its default in place.
    if (is_local_peer && !options_.congestion.empty())
        ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, options_.congestion.data(), static_cast<socklen_t>(options_.congestion.size()));
}

}  // namespace kbtp

// A software RNIC: the region table, the queue pairs and listeners, and the progress thread that drives them.
//
// The progress thread waits in epoll; other threads reach it through `submit`. Everything that changes a queue pair's state runs on it, or
// on a thread that waits for that pair and holds its progress lock.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "queue_pair.hpp"

namespace kbtp {

struct DeviceOptions {
    u32 mulpdu = 61440 + wire::kUntaggedHeader;  // largest ULPDU that is sent
    std::string congestion;                      // TCP congestion control for peers on this host; empty: the system's
    u32 first_atomic_id = 1;
    Clock::duration spin{};  // how long a thread looks for more before it sleeps
    std::deque<u32> fixed_stags;
    bool crc = true;            // ask for CRCs: they are off only if the peer does not ask either
    bool peer_to_peer = false;  // connect so that either side may send first
    std::optional<CaptureOptions> capture = {};
};

class Listener;

class Device : public std::enable_shared_from_this<Device> {
  public:
    explicit Device(DeviceOptions options);
    ~Device();
    void start();
    void close();  // ends every queue pair and the thread; idempotent

    const DeviceOptions& options() const { return options_; }
    RegionTable& regions() { return regions_; }
    u32 new_pd() { return next_pd_.fetch_add(1); }
    std::shared_ptr<QueuePair> create_qp(u32 pd, std::shared_ptr<CompletionQueue> cq, QueueLimits limits);
    std::shared_ptr<Listener> listen(const std::string& host, u16 port, std::shared_ptr<CompletionQueue> cq, double startup_timeout_s,
                                     u32 backlog);

    // Run on the progress thread, soon. False, and dropped, once the device is closed.
    bool submit(std::function<void()> task);

    // Progress thread only.
    void watch(int fd, Pollable* who, u32 events);
    void unwatch(int fd);
    void forget(const Listener& listener);

    // Any thread.
    void forget(QueuePair& qp);
    void time(std::shared_ptr<Pollable> who);  // its `deadline`, set before, is kept from now on
    void keep_until_idle(std::shared_ptr<Pollable> who);
    void rearm(int fd, Pollable* who, u32 events);  // what is waited for on a watched socket

    // Null without a capture.
    std::unique_ptr<CaptureStream> capture(int fd, bool is_active) const;
    // Any thread.
    DeviceStats stats();

    void configure_socket(int fd, bool is_local_peer) const;

  private:
    void run();
    int wait_for_events(std::span<epoll_event> events, TimePoint& spin_until);
    void run_tasks();
    void bury();
    int run_deadlines();  // returns milliseconds until the next one, or -1

    const DeviceOptions options_;
    const std::shared_ptr<Capture> capture_;
    RegionTable regions_;
    const int epoll_fd_, wake_fd_;
    std::atomic<u32> next_pd_{1}, next_qp_{1};
    std::atomic<bool> stopping_{false};

    std::mutex tasks_mutex_;  // guards the two below
    std::vector<std::function<void()>> tasks_;
    bool closed_ = false;

    std::mutex pairs_mutex_;  // guards the four below
    std::unordered_map<u32, std::shared_ptr<QueuePair>> pairs_;
    DeviceStats ended_;                                 // what the pairs that are no more had counted
    std::vector<std::shared_ptr<Pollable>> graveyard_;  // ended during this round of events, whose pointers may still be in it
    bool finished_ = false;                             // there will be no more rounds

    // Progress thread only.
    std::vector<std::shared_ptr<Listener>> listeners_;
    std::vector<std::weak_ptr<Pollable>> timed_;
    std::thread thread_;
};

template <class Task>
bool QueuePair::later(Task task) {
    return device_->submit([self = shared_from_this(), task = std::move(task)]() mutable {
        const std::lock_guard lock(self->progress_mutex_);
        task(*self);
    });
}

// A peer whose MPA Request is being read, or waits for an answer.
class PendingConnection : public Pollable, public std::enable_shared_from_this<PendingConnection> {
  public:
    PendingConnection(std::shared_ptr<Device> device, std::weak_ptr<Listener> listener, int fd, std::string peer);
    ~PendingConnection() override;
    void on_event(u32 events) override;
    void on_deadline() override;

    const std::string& peer() const { return peer_; }
    const std::vector<u8>& private_data() const { return request_.private_data; }
    // Any thread, once: hand the connection to a queue pair, or refuse it.
    std::shared_ptr<QueuePair> create_qp(u32 pd, std::shared_ptr<CompletionQueue> cq, QueueLimits limits);
    void reject(std::vector<u8> private_data);
    bool is_announced() const { return announced_; }  // progress thread

    void drop();  // progress thread

  private:
    const std::shared_ptr<Device> device_;
    const std::weak_ptr<Listener> listener_;
    int fd_;
    const std::string peer_;
    std::unique_ptr<CaptureStream> capture_;
    std::vector<u8> frame_;
    wire::Startup request_;
    bool announced_ = false, watched_ = true;
    std::atomic<bool> taken_{false};
};

class Listener : public Pollable, public std::enable_shared_from_this<Listener> {
  public:
    Listener(std::shared_ptr<Device> device, int fd, std::string host, u16 port, std::shared_ptr<CompletionQueue> cq,
             double startup_timeout_s, u32 backlog);
    ~Listener() override;
    void on_event(u32 events) override;
    void on_deadline() override;

    const std::string& host() const { return host_; }
    u16 port() const { return port_; }
    std::vector<std::shared_ptr<PendingConnection>> poll();
    void close();  // any thread

    // Progress thread.
    void announce(std::shared_ptr<PendingConnection> request);
    void gone(const PendingConnection* request);
    double startup_timeout_s() const { return startup_timeout_s_; }

  private:
    void pause();
    bool make_room();

    const std::shared_ptr<Device> device_;
    int fd_;
    const std::string host_;
    const u16 port_;
    const std::shared_ptr<CompletionQueue> cq_;
    const double startup_timeout_s_;
    const u32 backlog_;
    std::vector<std::shared_ptr<PendingConnection>> starting_;  // progress thread: not yet announced, or not yet taken
    std::mutex mutex_;                                          // guards ready_
    std::vector<std::shared_ptr<PendingConnection>> ready_;
};

std::string peer_name(int fd);
bool is_local_address(int fd);

}  // namespace kbtp

// A software RNIC: the region table, the queue pairs and listeners, and the progress threads that drive them.
//
// Everything that changes a queue pair's state runs on its own progress thread, or on a thread that holds the pair's progress lock. Two
// queue pairs share the region table, a completion queue perhaps, and an executor: those have locks, or rules, of their own.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "loop.hpp"
#include "queue_pair.hpp"
#include "tcp.hpp"

namespace kbtp {

struct DeviceOptions {
    u32 mulpdu = 61440 + wire::kUntaggedHeader;  // largest ULPDU that is sent
    u32 first_atomic_id = 1;
    Clock::duration spin{};  // how long a thread looks for more before it sleeps
    std::deque<u32> fixed_stags;
    bool crc = true;            // ask for CRCs: they are off only if the peer does not ask either
    bool peer_to_peer = false;  // connect so that either side may send first
    std::optional<CaptureOptions> capture = {};
    u32 progress_threads = 1;
    TcpOptions tcp = {};
};

class Listener;

class Device : public std::enable_shared_from_this<Device> {
  public:
    explicit Device(DeviceOptions options);
    ~Device();
    void start();
    void close();  // ends every queue pair and the threads; not from one of them; idempotent

    const DeviceOptions& options() const { return options_; }
    RegionTable& regions() { return regions_; }
    u32 new_pd() { return next_pd_.fetch_add(1); }
    std::shared_ptr<QueuePair> create_qp(u32 pd, std::shared_ptr<CompletionQueue> cq, QueueLimits limits);
    std::shared_ptr<Listener> listen(const std::string& host, u16 port, std::shared_ptr<CompletionQueue> cq, double startup_timeout_s,
                                     u32 backlog);

    // Any thread.
    void forget(QueuePair& qp);
    DeviceStats stats();
    // Null without a capture.
    std::unique_ptr<CaptureStream> capture(int fd, bool is_active) const;

    // Where listeners and what they have accepted live, until a queue pair takes it over.
    Loop& front() { return *loops_.front(); }
    void forget(const Listener& listener);  // on that loop

  private:
    struct Known {
        std::shared_ptr<QueuePair> pair;
        std::size_t loop;
    };

    const DeviceOptions options_;
    const std::shared_ptr<Capture> capture_;
    RegionTable regions_;
    std::vector<std::unique_ptr<Loop>> loops_;
    std::atomic<u32> next_pd_{1}, next_qp_{1};
    std::atomic<bool> closed_{false};

    std::mutex pairs_mutex_;  // guards the four below
    std::unordered_map<u32, Known> pairs_;
    std::vector<std::size_t> loads_;  // pairs of each loop
    DeviceStats ended_;               // what the pairs that are no more had counted
    bool finished_ = false;           // no pair is added any more

    std::vector<std::shared_ptr<Listener>> listeners_;  // the front loop's, and `close` once that has ended
};

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
    bool is_announced() const { return announced_; }  // the front loop's thread

    void drop();  // the front loop's thread

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

    // The front loop's thread.
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
    std::vector<std::shared_ptr<PendingConnection>> starting_;  // the front loop's thread: not yet announced, or not yet taken
    std::mutex mutex_;                                          // guards ready_
    std::vector<std::shared_ptr<PendingConnection>> ready_;
};

}  // namespace kbtp

// A progress thread: it waits in epoll for the sockets that it was given, calls those they belong to, keeps their deadlines, and runs what
// other threads submit. A device has one or more; a queue pair stays with one of them for its life, and listeners are on the first.
//
// Rules:
// 1. epoll holds plain pointers. What an event that was fetched already may still name is kept (`keep_until_idle`) to the end of that
// round.
// 2. Tasks run in the order submitted. From `stop` on none is taken; those taken before have run when `join` has returned.
// 3. Nothing is called after `join` has returned, so then whoever owns the loop may take apart what was watched, on any thread.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "spin.hpp"
#include "types.hpp"

namespace kbtp {

// What a loop calls, on its own thread.
class Pollable {
  public:
    virtual ~Pollable() = default;
    virtual void on_event(u32 events) = 0;
    virtual void on_deadline() = 0;
    std::atomic<TimePoint> deadline = TimePoint::max();  // any thread may set it, and then calls Loop::time
};

class Loop {
  public:
    // `spin` is how long the thread looks for more before it sleeps.
    explicit Loop(Clock::duration spin);
    ~Loop();
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;

    void start();
    void stop();        // any thread; idempotent
    void join();        // not from a loop's thread
    void forget_all();  // after `join`: whatever was kept is let go, and nothing is kept any more

    // --- any thread ---------------------------------------------------------------------------------------------------------
    // Run on the loop's thread, soon. False, and dropped, once the loop was stopped.
    bool submit(std::function<void()> task);
    void watch(int fd, Pollable* who, u32 events);
    void rearm(int fd, Pollable* who, u32 events);  // what is waited for on a watched socket
    void unwatch(int fd);
    void time(std::shared_ptr<Pollable> who);  // its `deadline`, set before, is kept from now on
    void keep_until_idle(std::shared_ptr<Pollable> who);

  private:
    void run();
    int wait_for_events(std::span<epoll_event> events);
    void run_tasks();
    void bury();
    int run_deadlines();  // returns milliseconds until the next one, or -1
    void wake();          // with tasks_mutex_ held

    const bool spins_;
    Spin spin_;  // of the thread
    const int epoll_fd_, wake_fd_;

    std::mutex tasks_mutex_;  // guards the two below
    std::vector<std::function<void()>> tasks_;
    bool stopped_ = false;

    std::mutex graveyard_mutex_;                        // guards the two below
    std::vector<std::shared_ptr<Pollable>> graveyard_;  // ended during this round of events, whose pointers may still be in it
    bool is_over_ = false;                              // there will be no more rounds

    // The loop's thread only.
    bool stopping_ = false;
    std::vector<std::weak_ptr<Pollable>> timed_;

    std::thread thread_;
};

}  // namespace kbtp

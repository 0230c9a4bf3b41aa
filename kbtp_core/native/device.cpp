#include "device.hpp"

#include <algorithm>

namespace kbtp {

Device::Device(DeviceOptions options)
    : options_(std::move(options)),
      capture_(options_.capture ? std::make_shared<Capture>(*options_.capture) : nullptr),
      regions_(options_.fixed_stags),
      loads_(options_.progress_threads) {
    for (u32 i = 0; i < options_.progress_threads; ++i) loops_.push_back(std::make_unique<Loop>(options_.spin));
}

Device::~Device() { close(); }

void Device::start() {
    for (const auto& loop : loops_) loop->start();
}

void Device::close() {
    if (closed_.exchange(true)) return;
    for (const auto& loop : loops_) loop->stop();
    for (const auto& loop : loops_) loop->join();
    // Whatever still lives ends here. Threads that drive or post may still be about: a pair's own locks hold them off.
    std::vector<std::shared_ptr<QueuePair>> pairs;
    {
        std::lock_guard lock(pairs_mutex_);
        finished_ = true;
        for (const auto& [number, known] : pairs_) pairs.push_back(known.pair);
    }
    for (const auto& pair : pairs) pair->end_now();
    listeners_.clear();
    for (const auto& loop : loops_) loop->forget_all();
}

// A pair stays with one loop: the one that has the fewest now, and rather not the front one, which has the listeners, too.
std::shared_ptr<QueuePair> Device::create_qp(u32 pd, std::shared_ptr<CompletionQueue> cq, QueueLimits limits) {
    std::shared_ptr<QueuePair> pair;
    {
        std::lock_guard lock(pairs_mutex_);
        const auto at = static_cast<std::size_t>(loads_.rend() - std::min_element(loads_.rbegin(), loads_.rend())) - 1;
        pair = std::make_shared<QueuePair>(shared_from_this(), *loops_[at], next_qp_.fetch_add(1), pd, cq, limits);
        if (!finished_) {
            pairs_[pair->number()] = {pair, at};
            ++loads_[at];
        }
    }
    cq->attach(pair);
    return pair;
}

void Device::forget(QueuePair& qp) {
    const QueuePairStats last = qp.stats();
    std::shared_ptr<QueuePair> pair;
    std::lock_guard lock(pairs_mutex_);
    const auto it = pairs_.find(qp.number());
    if (it == pairs_.end()) return;
    loops_[it->second.loop]->keep_until_idle(it->second.pair);
    pair = std::move(it->second.pair);
    --loads_[it->second.loop];
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
        for (const auto& [number, known] : pairs_) alive.push_back(known.pair);
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

void Device::forget(const Listener& listener) {
    std::erase_if(listeners_, [&](const auto& known) { return known.get() == &listener; });
}

}  // namespace kbtp

// What queue pairs count. kbtp_core/fabric/counters.py says what each name means.
#pragma once

#include <atomic>
#include <map>
#include <optional>

#include "capture.hpp"

namespace kbtp {

// Written by one thread at a time, read by any.
class Counter {
  public:
    Counter() = default;
    Counter(const Counter& other) : value_(u64{other}) {}
    Counter& operator=(const Counter& other) { return *this = u64{other}; }
    Counter& operator=(u64 value) {
        value_.store(value, std::memory_order_relaxed);
        return *this;
    }
    Counter& operator+=(u64 more) { return *this = u64{*this} + more; }
    Counter& operator++() { return *this += 1; }
    operator u64() const { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<u64> value_{0};
};

struct QueuePairStats {
    Counter bytes_sent, bytes_received, fpdus_sent, fpdus_received, messages_sent, messages_received;
    Counter crc_errors, terminates_sent, terminates_received, retransmitted_segments;
    Counter ord_stalls, socket_stalls;
    Counter executed_loads, executed_stores, executed_frees, executed_keyed;
    // No sums: the code of the one Terminate each way, as TerminateCode::packed has it, or 0; what the peer said in its start-up frame.
    Counter terminate_sent, terminate_received;
    Counter peer_ird, peer_ord;
    Counter stores_under_way;  // of the executor: those whose data has not come yet
};

struct NamedCounter {
    const char* name;
    Counter QueuePairStats::* counter;
};
inline constexpr NamedCounter kCounters[] = {
    {"bytes_sent", &QueuePairStats::bytes_sent},
    {"bytes_received", &QueuePairStats::bytes_received},
    {"fpdus_sent", &QueuePairStats::fpdus_sent},
    {"fpdus_received", &QueuePairStats::fpdus_received},
    {"messages_sent", &QueuePairStats::messages_sent},
    {"messages_received", &QueuePairStats::messages_received},
    {"crc_errors", &QueuePairStats::crc_errors},
    {"terminates_sent", &QueuePairStats::terminates_sent},
    {"terminates_received", &QueuePairStats::terminates_received},
    {"retransmitted_segments", &QueuePairStats::retransmitted_segments},
    {"ord_stalls", &QueuePairStats::ord_stalls},
    {"socket_stalls", &QueuePairStats::socket_stalls},
    {"executed_loads", &QueuePairStats::executed_loads},
    {"executed_stores", &QueuePairStats::executed_stores},
    {"executed_frees", &QueuePairStats::executed_frees},
    {"executed_keyed", &QueuePairStats::executed_keyed},
};

// Of all queue pairs that a device has and had.
struct DeviceStats {
    QueuePairStats sum;
    std::map<u64, u64> terminates_sent, terminates_received;  // packed code -> how many
    u64 queue_pairs = 0, queue_pairs_ended = 0;
    std::optional<CaptureStats> capture;

    void add(const QueuePairStats& pair) {
        for (const NamedCounter& c : kCounters) sum.*c.counter += pair.*c.counter;
        if (pair.terminate_sent) ++terminates_sent[pair.terminate_sent];
        if (pair.terminate_received) ++terminates_received[pair.terminate_received];
    }
};

}  // namespace kbtp

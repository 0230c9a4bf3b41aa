// One queue pair whose peer is the fuzzer: real code, a real stream socket (a socket pair), a real progress thread.
//
// After each input: every receive has completed exactly once, DISCONNECTED was the last completion, guards around registered memory are
// whole, and no reader is left in the executor. A violation aborts, as a sanitizer's finding does.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "crc32c.hpp"
#include "device.hpp"
#include "executor_session.hpp"

namespace kbtp::fuzz {

#define FUZZ_CHECK(condition)                                                                  \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                                      \
        }                                                                                      \
    } while (false)

constexpr u32 kOpenStag = 0x1001, kReadOnlyStag = 0x1002, kPoolStag = 0x1003, kInboxStag = 0x1004;
constexpr std::size_t kPage = 512, kPages = 32, kGuard = 64, kReceive = 256, kReceives = 16;
constexpr u64 kEntries = 16, kBaseHandle = 100, kBlock = 1024;

// Memory between guards.
class Guarded {
  public:
    explicit Guarded(std::size_t size) : octets_(size + 2 * kGuard, 0xA5) { std::fill(data(), data() + size, u8{0}); }
    u8* data() { return octets_.data() + kGuard; }
    void check() const {
        for (std::size_t i = 0; i < kGuard; ++i) FUZZ_CHECK(octets_[i] == 0xA5 && octets_[octets_.size() - 1 - i] == 0xA5);
    }

  private:
    std::vector<u8> octets_;
};

// A device, a queue pair and everything that an STag can name; used once.
class World {
  public:
    World() : device_(std::make_shared<Device>(DeviceOptions{.fixed_stags = {kOpenStag, kReadOnlyStag, kPoolStag, kInboxStag}})) {
        device_->start();
    }
    ~World() { device_->close(); }

    // Give `stream` to the queue pair, in pieces of `piece` octets.
    void run(std::span<const u8> stream, std::size_t piece) {
        RegionTable& regions = device_->regions();
        const u32 pd = device_->new_pd();
        Guarded open(kPage * kPages), read_only(kPage), pool(kEntries * kBlock), inbox(kReceive * kReceives);
        std::vector<u8*> pages;
        for (std::size_t i = 0; i < kPages; ++i) pages.push_back(open.data() + (i * 7 % kPages) * kPage);
        const u8 all = access::local_write | access::remote_read | access::remote_write | access::remote_atomic | access::remote_invalidate;
        const RegionPtr kept[] = {
            regions.add(pd, all, pages, kPage, kPage * kPages),
            regions.add(pd, access::remote_read, {read_only.data()}, kPage, kPage),
            regions.add(pd, access::local_write, {pool.data()}, kEntries * kBlock, kEntries * kBlock),
            regions.add(pd, access::local_write, {inbox.data()}, kReceive * kReceives, kReceive * kReceives),
        };
        const auto cq = std::make_shared<CompletionQueue>();
        const auto qp = device_->create_qp(pd, cq, {.send_depth = 64, .receive_depth = 64, .ird = 4, .ord = 4});
        receive(*qp, kept[3]->stag());
        Pool state(pool.data());
        qp->attach_executor(state.executor, kept[2], state.grant());

        int ends[2];
        FUZZ_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
        wire::Startup request;
        request.ird = request.ord = 4;
        qp->adopt(ends[0], nullptr, "fuzzer", request);
        qp->accept({});
        say(ends[1], stream, piece);
        finish(*qp, *cq, ends[1]);
        ::close(ends[1]);
        for (const RegionPtr& region : kept) regions.remove(region);
        for (const Guarded* memory : {&open, &read_only, &pool, &inbox}) memory->check();
        for (u64 entry = 0; entry < kEntries; ++entry) FUZZ_CHECK(state.executor->readers(entry) == 0);
        for (u64 entry = 0; entry < kEntries; ++entry) FUZZ_CHECK(state.entry_states[entry] <= 1);
    }

  private:
    // A table with every kind of entry, and a ring with the blocks that are left.
    struct Pool {
        explicit Pool(u8* memory) {
            PoolState s{};
            s.memory = memory;
            s.blocks = kEntries;
            s.block_states = block_states.data();
            s.entry_states = entry_states.data();
            s.owners = owners.data();
            s.generations = generations.data();
            s.slots = slots.data();
            s.counters = counters.data();
            s.log2_slots = 4;
            s.masked = true;
            s.clears = true;
            generations.fill(1);
            for (u64 i = 0; i < kEntries; ++i) {
                store_be<u16>(table() + 16 * i + 2, 1);
                slots[4 * i] = swap_to_host(static_cast<u32>(i));
                store_be<u64>(reinterpret_cast<u8*>(&slots[4 * i + 2]), i * kBlock);
            }
            counters = {0, u64{kEntries} << 32};
            executor = std::make_shared<Executor>(table(), kEntries, kBaseHandle, static_cast<u32>(kBlock), s);
            const StoreGrant g = grant();
            for (u64 i = 0; i < 6; ++i) executor->bind(g, i, *executor->take(g, i), static_cast<u32>(kBlock), i % 2 == 0);
        }
        u8* table() { return reinterpret_cast<u8*>(words.data()); }
        StoreGrant grant() { return {7, kBaseHandle, kEntries - 2, 200, 12, &usage}; }

        std::array<u64, 2 * kEntries> words{};
        std::array<u8, kEntries> block_states{}, entry_states{};
        std::array<u64, kEntries> owners{};
        std::array<u16, kEntries> generations{};
        std::array<u32, 4 * kEntries> slots{};
        std::array<u64, 2> counters{};
        u64 usage = 0;
        std::shared_ptr<Executor> executor;
    };

    static void receive(QueuePair& qp, u32 stag) {
        std::vector<ReceiveRequest> requests;
        for (u64 i = 0; i < kReceives; ++i) requests.push_back({i, i * kReceive, stag, static_cast<u32>(kReceive)});
        FUZZ_CHECK(qp.post_receive(requests) == QueuePair::Posted::ok);
    }

    static void say(int fd, std::span<const u8> stream, std::size_t piece) {
        for (int stalls = 0; !stream.empty() && stalls < 100;) {
            const ssize_t n = ::send(fd, stream.data(), std::min(piece, stream.size()), MSG_NOSIGNAL);
            if (n > 0) {
                stream = stream.subspan(static_cast<std::size_t>(n));
            } else {
                drain(fd);
                ++stalls;
                ::usleep(100);
            }
        }
        ::shutdown(fd, SHUT_WR);
    }

    static bool drain(int fd) {
        std::array<u8, 4096> sink;
        for (;;) {
            const ssize_t n = ::recv(fd, sink.data(), sink.size(), 0);
            if (n <= 0) return n == 0;
        }
    }

    // A stream that leaves the pair waiting, for a Read's answer say, is cut off after a while.
    static void finish(QueuePair& qp, CompletionQueue& cq, int fd) {
        std::array<bool, kReceives> seen{};
        bool ended = false;
        for (int rounds = 0; !ended && rounds < 500; ++rounds) {
            drain(fd);
            if (rounds == 3) qp.abort();
            cq.wait(0.005);
            for (const Completion& one : cq.poll(64)) {
                FUZZ_CHECK(!ended);
                if (one.op == Op::receive || one.op == Op::receive_immediate) {
                    FUZZ_CHECK(one.wr_id < kReceives && !seen[one.wr_id]);
                    FUZZ_CHECK(one.length <= kReceive);
                    seen[one.wr_id] = true;
                }
                ended = one.op == Op::disconnected;
            }
        }
        FUZZ_CHECK(ended);
        for (const bool one : seen) FUZZ_CHECK(one);
    }

    const std::shared_ptr<Device> device_;
};

// [length, ULPDU, pad, CRC] around a ULPDU; the CRC is right.
inline void append_fpdu(std::vector<u8>& stream, std::span<const u8> ulpdu) {
    const std::size_t start = stream.size();
    stream.resize(start + wire::fpdu_size(static_cast<u32>(ulpdu.size())));
    store_be<u16>(&stream[start], static_cast<u16>(ulpdu.size()));
    std::copy(ulpdu.begin(), ulpdu.end(), stream.begin() + static_cast<std::ptrdiff_t>(start + wire::kLengthField));
    const std::size_t covered = stream.size() - start - wire::kCrcField;
    const u32 crc = crc32c_extend(0, &stream[start], covered);
    for (std::size_t i = 0; i < 4; ++i) stream[start + covered + i] = static_cast<u8>(crc >> (8 * i));
}

// The input, taken from the front.
class Input {
  public:
    Input(const u8* data, std::size_t size) : left_(data, size) {}
    bool empty() const { return left_.empty(); }
    u8 octet() { return static_cast<u8>(number<u8>()); }
    template <class T>
    T number() {
        T v{};
        const std::size_t n = std::min(sizeof v, left_.size());
        std::memcpy(&v, left_.data(), n);
        left_ = left_.subspan(n);
        return v;
    }
    std::span<const u8> bytes(std::size_t n) {
        const auto out = left_.first(std::min(n, left_.size()));
        left_ = left_.subspan(out.size());
        return out;
    }

  private:
    std::span<const u8> left_;
};

}  // namespace kbtp::fuzz

#include "read_ring.hpp"

#include <cerrno>
#include <deque>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#if defined(IORING_ENTER_EXT_ARG)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "io_pool.hpp"

namespace kbtp::store {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr u32 kEntries = 64;
constexpr u32 kMemory = u32{4} << 20;  // all reads in flight together
constexpr u32 kChunkMost = u32{256} << 10;

template <class T>
T* at(u8* base, u32 offset) {
    return reinterpret_cast<T*>(base + offset);
}

}  // namespace

// What this process and the kernel both look at.
struct ReadRing::Shared {
    int fd = -1;
    io_uring_params params{};
    u8* rings = nullptr;
    std::size_t rings_bytes = 0;
    io_uring_sqe* requests = nullptr;
    Bounce memory;

    bool open() {
        fd = static_cast<int>(::syscall(__NR_io_uring_setup, kEntries, &params));
        constexpr u32 kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;
        if (fd < 0 || (params.features & kNeeded) != kNeeded) return false;
        rings_bytes = std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(u32),
                                            params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
        rings = map<u8>(rings_bytes, IORING_OFF_SQ_RING);
        requests = map<io_uring_sqe>(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
        return rings && requests;
    }
    ~Shared() {
        if (requests) ::munmap(requests, params.sq_entries * sizeof(io_uring_sqe));
        if (rings) ::munmap(rings, rings_bytes);
        if (fd >= 0) ::close(fd);
    }

    template <class T>
    T* map(std::size_t size, u64 offset) const {
        void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
        return mapped == MAP_FAILED ? nullptr : static_cast<T*>(mapped);
    }

    void push(int file, u8* into, u32 size, u64 offset, u64 number) const {
        u32* tail = at<u32>(rings, params.sq_off.tail);
        const u32 index = *tail & *at<u32>(rings, params.sq_off.ring_mask);
        io_uring_sqe request{};
        request.opcode = IORING_OP_READ;
        request.fd = file;
        request.addr = reinterpret_cast<std::uintptr_t>(into);
        request.len = size;
        request.off = offset;
        request.user_data = number;
        requests[index] = request;
        at<u32>(rings, params.sq_off.array)[index] = index;
        __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    }

    // How many of `count` requests the kernel took; waits for a completion, but not longer than `timeout`.
    u32 submit_and_wait(u32 count, u32 wanted, std::chrono::milliseconds timeout) const {
        __kernel_timespec until{timeout.count() / 1000, timeout.count() % 1000 * 1000000};
        io_uring_getevents_arg argument{};
        argument.ts = reinterpret_cast<std::uintptr_t>(&until);
        const long taken =
            ::syscall(__NR_io_uring_enter, fd, count, wanted, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &argument, sizeof argument);
        return taken > 0 ? static_cast<u32>(taken) : 0;
    }

    template <class Each>
    void reap(Each&& each) const {
        u32* head = at<u32>(rings, params.cq_off.head);
        const u32 tail = __atomic_load_n(at<u32>(rings, params.cq_off.tail), __ATOMIC_ACQUIRE);
        const u32 mask = *at<u32>(rings, params.cq_off.ring_mask);
        u32 now = *head;
        for (; now != tail; ++now) {
            const io_uring_cqe& done = at<io_uring_cqe>(rings, params.cq_off.cqes)[now & mask];
            each(done.user_data, done.res);
        }
        __atomic_store_n(head, now, __ATOMIC_RELEASE);
    }
};

// One batch. Reads are begun in the order of the batch, and taken in that order too, for a checksum goes from the first octet to the last;
// so the oldest one is always in flight, and something always comes.
class ReadRing::Run {
  public:
    Run(Shared& shared, const DiskFile& file, std::span<Transfer> transfers) : shared_(shared), file_(file), transfers_(transfers) {
        u32 longest = 0;
        for (const Transfer& t : transfers) longest = std::max(longest, t.read_end() - t.read_begin());
        chunk_ = std::min(whole_units(longest), kChunkMost);
        const u32 slots = std::min(kEntries, kMemory / chunk_);
        for (u32 slot = 0; slot < slots; ++slot) free_.push_back(shared.memory.room(kMemory) + std::size_t{slot} * chunk_);
        if (!transfers.empty()) at_ = transfers[0].read_begin();
    }

    bool run(std::chrono::milliseconds timeout) {
        auto last_progress = SteadyClock::now();
        for (;;) {
            while (!free_.empty() && next_ < transfers_.size()) begin();
            if (take()) {
                last_progress = SteadyClock::now();
                continue;
            }
            if (chunks_.empty()) return true;
            unsubmitted_ -= shared_.submit_and_wait(unsubmitted_, 1, timeout);
            bool came = false;
            shared_.reap([&](u64 number, int result) {
                Chunk& chunk = chunks_[number - first_];
                chunk.is_done = came = true;
                chunk.error = result < 0 ? -result : static_cast<u32>(result) < chunk.size ? EIO : 0;
            });
            if (came) last_progress = SteadyClock::now();
            if (SteadyClock::now() - last_progress >= timeout) return false;
        }
    }

  private:
    struct Chunk {
        u32 transfer, at, size;
        u8* memory;
        Fault fault;
        bool is_done = false;
        int error = 0;
    };

    void begin() {
        const Transfer& t = transfers_[next_];
        const u32 size = std::min(chunk_, t.read_end() - at_);
        Chunk chunk{static_cast<u32>(next_), at_, size, free_.back(), file_.ahead_of(FaultPoint::payload_read)};
        free_.pop_back();
        chunk.error = error_of(chunk.fault);
        chunk.is_done = chunk.error != 0;
        if (!chunk.is_done && chunk.fault.action != FaultAction::hang) {
            shared_.push(file_.fd(), chunk.memory, whole_units(size), t.payload + at_, first_ + chunks_.size());
            ++unsubmitted_;
        }
        chunks_.push_back(chunk);
        at_ += size;
        if (at_ < t.read_end()) return;
        if (++next_ < transfers_.size()) at_ = transfers_[next_].read_begin();
    }

    // The oldest chunks that have come; whether there were any.
    bool take() {
        bool took = false;
        for (; !chunks_.empty() && chunks_.front().is_done; took = true) {
            const Chunk& chunk = chunks_.front();
            Transfer& t = transfers_[chunk.transfer];
            if (chunk.error) t.error = chunk.error;
            if (chunk.fault.action == FaultAction::flip)
                chunk.memory[chunk.fault.amount / 8 % chunk.size] ^= static_cast<u8>(1u << chunk.fault.amount % 8);
            if (!t.error) t.take(chunk.memory, chunk.at, chunk.size);
            free_.push_back(chunk.memory);
            chunks_.pop_front();
            ++first_;
        }
        return took;
    }

    Shared& shared_;
    const DiskFile& file_;
    const std::span<Transfer> transfers_;
    u32 chunk_ = 0, at_ = 0, unsubmitted_ = 0;
    std::size_t next_ = 0;  // the transfer that is begun next, from `at_` on
    u64 first_ = 0;         // the number of the oldest chunk
    std::deque<Chunk> chunks_;
    std::vector<u8*> free_;
};

ReadRing::ReadRing(std::unique_ptr<Shared> shared) : shared_(std::move(shared)) {}
ReadRing::~ReadRing() = default;

std::unique_ptr<ReadRing> ReadRing::open() {
    auto shared = std::make_unique<Shared>();
    if (!shared->open()) return nullptr;
    return std::unique_ptr<ReadRing>(new ReadRing(std::move(shared)));
}

bool ReadRing::run(const DiskFile& file, std::span<Transfer> transfers, std::chrono::milliseconds timeout) {
    const bool is_done = Run(*shared_, file, transfers).run(timeout);
    crc32c_copy_fence();
    return is_done;
}

}  // namespace kbtp::store

#else

namespace kbtp::store {

struct ReadRing::Shared {};
ReadRing::~ReadRing() = default;
std::unique_ptr<ReadRing> ReadRing::open() { return nullptr; }
bool ReadRing::run(const DiskFile&, std::span<Transfer>, std::chrono::milliseconds) { return false; }

}  // namespace kbtp::store

#endif

#include "power_loss.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "check.hpp"

namespace kbtp::store {
namespace {

constexpr std::size_t kSector = 512;

// The same file without O_DIRECT.
int buffered(int fd) {
    const int again = ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC);
    KBTP_CHECK(again >= 0);
    return again;
}

bool is_lost(u64 seed, u64 number, std::size_t sector) {
    return seed == 0 || ((seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + sector * 0x94D049BB133111EB) >> 40 & 1);
}

}  // namespace

void UnsyncedWrites::before_write(int fd, u64 offset, std::size_t size) {
    Write write{fd, 0, offset, std::vector<u8>(size)};
    const int file = buffered(fd);
    const ssize_t got = ::pread(file, write.before.data(), size, static_cast<off_t>(offset));
    ::close(file);
    write.before.resize(got > 0 ? static_cast<std::size_t>(got) : 0);  // behind the end there was nothing
    const std::lock_guard guard(mutex_);
    write.number = ++count_;
    writes_.push_back(std::move(write));
}

u64 UnsyncedWrites::mark() {
    const std::lock_guard guard(mutex_);
    return count_;
}

void UnsyncedWrites::synced(int fd, u64 mark) {
    const std::lock_guard guard(mutex_);
    std::erase_if(writes_, [&](const Write& write) { return write.fd == fd && write.number <= mark; });
}

void UnsyncedWrites::take_back(u64 seed) {
    const std::lock_guard guard(mutex_);
    for (auto write = writes_.rbegin(); write != writes_.rend(); ++write) {
        const int file = buffered(write->fd);
        for (std::size_t at = 0; at < write->before.size(); at += kSector) {
            if (!is_lost(seed, write->number, at / kSector)) continue;
            const std::size_t size = std::min(kSector, write->before.size() - at);
            KBTP_CHECK(::pwrite(file, write->before.data() + at, size, static_cast<off_t>(write->offset + at)) ==
                       static_cast<ssize_t>(size));
        }
        ::close(file);
    }
}

}  // namespace kbtp::store

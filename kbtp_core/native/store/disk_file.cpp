#include "disk_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

namespace kbtp::store {
namespace {

constexpr std::size_t kAlignment = 4096;

int write_all(int fd, const u8* from, std::size_t size, u64 offset) {
    while (size > 0) {
        const ssize_t n = ::pwrite(fd, from, size, static_cast<off_t>(offset));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EIO;
        from += n;
        offset += static_cast<u64>(n);
        size -= static_cast<std::size_t>(n);
    }
    return 0;
}

struct AlignedCopy {
    AlignedCopy(const void* from, std::size_t size)
        : data(static_cast<u8*>(std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment))) {
        if (!data) throw std::bad_alloc();
        std::memcpy(data, from, size);
    }
    ~AlignedCopy() { std::free(data); }
    AlignedCopy(const AlignedCopy&) = delete;
    AlignedCopy& operator=(const AlignedCopy&) = delete;
    u8* data;
};

int result_of(int returned, const Fault& fault) {
    const int error = returned == 0 ? 0 : errno;
    if (fault.action == FaultAction::kill_after) Faults::die();
    return error;
}

}  // namespace

DiskFile::DiskFile(const std::string& path, int flags, std::shared_ptr<Faults> faults)
    : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0644)), faults_(std::move(faults)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), path);
}

DiskFile::~DiskFile() { ::close(fd_); }

int DiskFile::write(FaultPoint point, const void* from, std::size_t size, u64 offset, const std::atomic<bool>* given_up) const {
    const Fault fault = faults_->visit(point);
    if (const int error = error_of(fault)) return error;
    if (given_up && given_up->load()) return ETIMEDOUT;
    if (auto* unsynced = faults_->unsynced()) unsynced->before_write(fd_, offset, size);
    const u8* octets = static_cast<const u8*>(from);
    if (fault.action == FaultAction::torn) {
        // A prefix of the new octets, which ends inside a sector: the rest of that sector is as it was.
        const std::size_t torn = std::min<std::size_t>(fault.amount, size);
        const int buffered = ::open(("/proc/self/fd/" + std::to_string(fd_)).c_str(), O_WRONLY | O_CLOEXEC);
        write_all(buffered, octets, torn, offset);
        Faults::die();
    }
    if (fault.action == FaultAction::flip) {
        const AlignedCopy copy(octets, size);
        copy.data[fault.amount / 8 % size] ^= static_cast<u8>(1u << fault.amount % 8);
        return write_all(fd_, copy.data, size, offset);
    }
    const int error = write_all(fd_, octets, size, offset);
    if (fault.action == FaultAction::kill_after) Faults::die();
    return error;
}

int DiskFile::read(FaultPoint point, void* to, std::size_t size, u64 offset) const {
    const Fault fault = faults_->visit(point);
    if (const int error = error_of(fault)) return error;
    u8* octets = static_cast<u8*>(to);
    for (std::size_t done = 0; done < size;) {
        const ssize_t n = ::pread(fd_, octets + done, size - done, static_cast<off_t>(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EIO;
        done += static_cast<std::size_t>(n);
    }
    if (fault.action == FaultAction::flip) octets[fault.amount / 8 % size] ^= static_cast<u8>(1u << fault.amount % 8);
    return 0;
}

int DiskFile::sync(FaultPoint point) const {
    const Fault fault = faults_->visit(point);
    if (const int error = error_of(fault)) return error;
    auto* unsynced = faults_->unsynced();
    const u64 mark = unsynced ? unsynced->mark() : 0;
    const int error = result_of(::fdatasync(fd_), fault);
    if (unsynced && error == 0) unsynced->synced(fd_, mark);
    return error;
}

int DiskFile::allocate(FaultPoint point, u64 size) const {
    const Fault fault = faults_->visit(point);
    if (const int error = error_of(fault)) return error;
    return result_of(::fallocate(fd_, 0, 0, static_cast<off_t>(size)), fault);
}

int DiskFile::punch(FaultPoint point, u64 offset, u64 size) const {
    const Fault fault = faults_->visit(point);
    if (const int error = error_of(fault)) return error;
    if (auto* unsynced = faults_->unsynced()) unsynced->before_write(fd_, offset, size);
    return result_of(::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(size)),
                     fault);
}

int DiskFile::resize(u64 size) const { return ::ftruncate(fd_, static_cast<off_t>(size)) == 0 ? 0 : errno; }

u64 DiskFile::size() const {
    struct stat info{};
    return ::fstat(fd_, &info) == 0 ? static_cast<u64>(info.st_size) : 0;
}

u64 DiskFile::next_data(u64 from) const {
    const off_t at = ::lseek(fd_, static_cast<off_t>(from), SEEK_DATA);
    if (at >= 0) return static_cast<u64>(at);
    return errno == ENXIO ? ~u64{0} : from;  // a filesystem that can't say: all of it may be data
}

u64 DiskFile::next_hole(u64 from) const {
    const off_t at = ::lseek(fd_, static_cast<off_t>(from), SEEK_HOLE);
    return at >= 0 ? static_cast<u64>(at) : size();
}

}  // namespace kbtp::store

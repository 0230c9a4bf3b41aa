// A file of a disk engine. Each call that can fail returns 0 or an errno and passes a fault point first.
#pragma once

#include <memory>
#include <string>

#include "fault.hpp"

namespace kbtp::store {

// Any thread.
class DiskFile {
  public:
    // Throws std::system_error.
    DiskFile(const std::string& path, int flags, std::shared_ptr<Faults> faults);
    ~DiskFile();
    DiskFile(const DiskFile&) = delete;
    DiskFile& operator=(const DiskFile&) = delete;

    // Does not begin, and is an ETIMEDOUT, if nobody waits for it any more: `given_up` is set.
    int write(FaultPoint point, const void* from, std::size_t size, u64 offset, const std::atomic<bool>* given_up = nullptr) const;
    int read(FaultPoint point, void* to, std::size_t size, u64 offset) const;  // fewer octets than asked for are an EIO
    int sync(FaultPoint point) const;
    // Make a file of `size` octets that are all there; EOPNOTSUPP where the filesystem does not do that.
    int allocate(FaultPoint point, u64 size) const;
    int punch(FaultPoint point, u64 offset, u64 size) const;  // zeros from now on, and no space
    int resize(u64 size) const;
    u64 size() const;
    u64 next_data(u64 from) const;  // where the next octets are that may be other than zero, ~0 if there are none
    u64 next_hole(u64 from) const;
    // For who reads by other means than this class.
    Fault ahead_of(FaultPoint point) const { return faults_->visit(point, false); }
    int fd() const { return fd_; }

  private:
    int fd_;
    std::shared_ptr<Faults> faults_;
};

}  // namespace kbtp::store

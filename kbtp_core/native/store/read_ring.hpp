// Batches of small reads through io_uring: many in flight from one thread, several times as many a second as threads make.
//
// One caller at a time. Octets land in the ring's own memory first, and the caller's thread checks and copies them, so a read that
// completes late, after its caller gave up, touches nothing of the caller's.
#pragma once

#include <chrono>
#include <memory>
#include <span>

#include "disk_file.hpp"
#include "transfer.hpp"

namespace kbtp::store {

class ReadRing {
  public:
    // Nothing where the kernel has no io_uring, or does not let us.
    static std::unique_ptr<ReadRing> open();
    ~ReadRing();
    ReadRing(const ReadRing&) = delete;
    ReadRing& operator=(const ReadRing&) = delete;

    // False if the disk made no progress for `timeout`: then the ring must be kept as it is for ever, for the kernel may still write to it.
    bool run(const DiskFile& file, std::span<Transfer> transfers, std::chrono::milliseconds timeout);

  private:
    struct Shared;
    class Run;
    explicit ReadRing(std::unique_ptr<Shared> shared);
    std::unique_ptr<Shared> shared_;
};

}  // namespace kbtp::store

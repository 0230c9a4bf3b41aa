// A power failure, for tests: what was written and not synced is lost, all of it or some of it.
//
// Before each write the octets that it replaces are kept, and forgotten once the file was synced. At the failure they are put back, and the
// process kills itself.
#pragma once

#include <mutex>
#include <vector>

#include "../bytes.hpp"

namespace kbtp::store {

// Any thread.
class UnsyncedWrites {
  public:
    void before_write(int fd, u64 offset, std::size_t size);
    // How many writes there were when a sync began, for its end.
    u64 mark();
    void synced(int fd, u64 mark);
    // Takes back each sector of 512 octets that was not synced, or with a seed about half of them.
    void take_back(u64 seed);

  private:
    struct Write {
        int fd;
        u64 number, offset;
        std::vector<u8> before;
    };
    std::mutex mutex_;  // guards all below
    std::vector<Write> writes_;
    u64 count_ = 0;
};

}  // namespace kbtp::store

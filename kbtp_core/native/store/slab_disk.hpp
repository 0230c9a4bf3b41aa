// A slab's folder on its disk: `extents.dat` with the payloads, `slots.tbl` with the records, `superblock`, and `lock`.
//
// Two rules make a record proof of its payload, after a crash at any moment:
// 1. A record is written after its payload is durable.
// 2. A slot is written again only after the record of what was in it was cleared durably.
//
// What goes to the disk goes through the pool, so that every wait has an end. The first write or sync that fails, the last of many reads
// that fail, and a disk that hangs degrade it: from then on nothing is written, and everything on it is a miss.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "disk_file.hpp"
#include "io_pool.hpp"
#include "read_ring.hpp"
#include "record.hpp"

namespace kbtp::store {

struct SlabOptions {
    std::string folder;
    u64 capacity_bytes = 0, extent_bytes = 0;
    bool direct = true, io_uring = true;
    u32 io_threads = 8;
    double io_timeout_s = 20;
    std::vector<Fault> faults;
};

struct PlacedRecord {
    u64 at;
    Record record;
};

// What a disk can answer instead of doing what it was asked for.
enum class DiskErrorKind : u8 { io, no_space, read_only, timeout, count };
inline constexpr const char* kDiskErrorNames[] = {"errors_io", "errors_no_space", "errors_read_only", "errors_timeout"};
static_assert(std::size(kDiskErrorNames) == static_cast<std::size_t>(DiskErrorKind::count));

class SlabDisk {
  public:
    // Opens, or makes, the store in a folder. Throws StoreError, and leaves what is there as it is.
    explicit SlabDisk(const SlabOptions& options);
    ~SlabDisk();
    SlabDisk(const SlabDisk&) = delete;
    SlabDisk& operator=(const SlabDisk&) = delete;

    const Geometry& geometry() const { return block_.geometry; }
    const StoreId& id() const { return block_.id; }
    const Superblock& superblock() const { return block_; }  // as it was found
    bool is_direct() const { return is_direct_; }
    bool is_allocated() const { return is_allocated_; }
    bool has_rings() const { return has_rings_.load(std::memory_order_relaxed); }

    // Every octet of the table that may be other than zero, in order, in runs of whole records. Throws StoreError.
    void scan(const std::function<void(u64 at, const u8* octets, std::size_t size)>& run);
    // Before the first write of this epoch. Throws StoreError.
    void begin_epoch();

    // Any thread; each returns 0 or an errno, ETIMEDOUT for a disk that hangs.
    int read(const Transfers& transfers);
    int write(const Transfers& transfers);
    int sync_payloads() { return payload_sync_.run(*this, FaultPoint::payload_sync); }
    int write_records(std::vector<PlacedRecord> records);
    int sync_table(FaultPoint point) { return (point == FaultPoint::record_sync ? record_sync_ : clear_sync_).run(*this, point); }
    int clear(std::vector<u64> records);
    int clear_part(u32 extent);

    // After everything: the superblock says so, unless the disk is degraded, and the folder is given up.
    int end_epoch(u64 next_sequence);

    void degrade(const std::string& why);
    bool is_degraded() const { return is_degraded_.load(std::memory_order_relaxed); }
    std::string why() const;
    void count_read_error(int error);
    u64 errors(DiskErrorKind kind) const { return errors_[static_cast<std::size_t>(kind)].load(std::memory_order_relaxed); }
    void count_good_read() { read_errors_.store(0, std::memory_order_relaxed); }
    const Faults& faults() const { return *faults_; }

  private:
    struct Files {
        DiskFile extents, table;
        std::shared_ptr<DiskFile> lock;  // kept as long as anything may still be written
    };
    // Callers that come while a sync runs share the next one.
    class GroupSync {
      public:
        int run(SlabDisk& disk, FaultPoint point);

      private:
        std::mutex mutex_;  // guards all below
        std::condition_variable ended_;
        u64 begun_count_ = 0, ended_count_ = 0;
    };

    std::string path(const char* name) const { return folder_ + "/" + name; }
    void lock_folder();
    void find_superblock(const Geometry& wanted);
    void make_files(const Geometry& geometry);
    void open_files(bool direct);
    int write_superblock_file(const Superblock& block);
    int sync_once(FaultPoint point);
    int on_pool(std::function<int()> work);
    int settle(int error, const char* what);
    void count_error(int error);
    std::unique_ptr<ReadRing> take_ring();
    bool read_by_ring(std::unique_ptr<ReadRing> ring, std::vector<Transfer>& transfers);

    const std::string folder_;
    const std::shared_ptr<Faults> faults_;
    std::shared_ptr<DiskFile> lock_;
    std::shared_ptr<Files> files_;
    IoPool pool_;
    Superblock block_;
    bool is_direct_ = false, is_allocated_ = true;
    const std::chrono::milliseconds timeout_;
    std::atomic<bool> has_rings_;
    std::mutex rings_mutex_;
    std::vector<std::unique_ptr<ReadRing>> rings_;  // that nobody uses now
    GroupSync payload_sync_, record_sync_, clear_sync_;
    std::atomic<bool> is_degraded_{false}, hangs_{false};
    std::atomic<u32> read_errors_{0};  // in a row
    std::array<std::atomic<u64>, static_cast<std::size_t>(DiskErrorKind::count)> errors_{};
    mutable std::mutex why_mutex_;
    std::string why_;
};

}  // namespace kbtp::store
